"""Dynamic tensor rematerialization of plain eager programs: ``lowtide.online``.

Kirisame et al., "Dynamic Tensor Rematerialization", ICLR 2021, arXiv 2006.09616. A dispatch mode below autograd sees every
operator; storages are emptied when the next allocation would exceed the budget and filled again when they are read, so that
all tensors on them, views and those that autograd saved included, see both. Which one goes is ``lowtide.eviction``'s choice.
"""
