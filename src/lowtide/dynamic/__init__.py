"""Dynamic tensor rematerialization of plain eager programs: ``lowtide.online``.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv 2006.09616. A dispatch mode below autograd sees every
operator. It evicts storages (empties them) when the next allocation would exceed the budget and rebuilds them before they are
read; every tensor on a storage, views and tensors saved by autograd included, sees both. ``lowtide.eviction`` chooses victims.
"""
