"""The counter's machine code: ``allocate``, ``release`` and ``raw_deleter`` of an allocator, as LLVM assembly.

``allocate`` asks for room where the limit would be exceeded, calls the original allocator, enters the block's size in a table
of (address, bytes) with open addressing, and puts ``release`` in the place of the deleter; ``release`` takes the block out of
the table and calls the original deleter. Both move the level and the peak by atomic operations, and log where that is asked
for. In braces are the addresses and numbers that ``assemble`` is given.
"""

from __future__ import annotations

_ASSEMBLY = """
declare i32 @clock_gettime(i32, ptr)
declare i64 @pthread_self()

define internal void @record(i64 %delta) {{
  %level = inttoptr i64 {level} to ptr
  %peak = inttoptr i64 {peak} to ptr
  %before = atomicrmw add ptr %level, i64 %delta seq_cst
  %now = add i64 %before, %delta
  %previous = atomicrmw max ptr %peak, i64 %now seq_cst
  %capacity = load atomic i64, ptr inttoptr (i64 {log_capacity} to ptr) seq_cst, align 8
  %logging = icmp sgt i64 %capacity, 0
  br i1 %logging, label %reserve, label %done
reserve:
  %index = atomicrmw add ptr inttoptr (i64 {log_length} to ptr), i64 1 seq_cst
  %fits = icmp slt i64 %index, %capacity
  br i1 %fits, label %write, label %done
write:
  %time = alloca [2 x i64], align 8
  %status = call i32 @clock_gettime(i32 {clock}, ptr %time)
  %seconds = load i64, ptr %time
  %fraction_at = getelementptr i64, ptr %time, i64 1
  %fraction = load i64, ptr %fraction_at
  %whole = mul i64 %seconds, 1000000000
  %ns = add i64 %whole, %fraction
  %log_address = load i64, ptr inttoptr (i64 {log_address} to ptr)
  %log = inttoptr i64 %log_address to ptr
  %word = mul i64 %index, 2
  %entry = getelementptr i64, ptr %log, i64 %word
  store i64 %ns, ptr %entry
  %level_at = getelementptr i64, ptr %entry, i64 1
  store i64 %now, ptr %level_at
  br label %done
done:
  ret void
}}

define internal i64 @first_slot(ptr %data) {{
  %address = ptrtoint ptr %data to i64
  %mixed = mul i64 %address, 11400714819323198485
  %slot = lshr i64 %mixed, {hash_shift}
  ret i64 %slot
}}

define internal ptr @slot_address(i64 %first, i64 %probe) {{
  %slot = add i64 %first, %probe
  %wrapped = and i64 %slot, {slot_mask}
  %word = mul i64 %wrapped, 2
  %address = getelementptr i64, ptr inttoptr (i64 {table} to ptr), i64 %word
  ret ptr %address
}}

define internal i64 @granted(i64 %bytes) uwtable {{
  %limit = load atomic i64, ptr inttoptr (i64 {limit} to ptr) seq_cst, align 8
  %level = load atomic i64, ptr inttoptr (i64 {level} to ptr) seq_cst, align 8
  %room = sub i64 %limit, %level
  %fits = icmp sle i64 %bytes, %room
  br i1 %fits, label %yes, label %over
over:
  %thread = call i64 @pthread_self()
  %asked = load atomic i64, ptr inttoptr (i64 {thread} to ptr) seq_cst, align 8
  %ours = icmp eq i64 %thread, %asked
  br i1 %ours, label %ask, label %yes
ask:
  %answer = call i32 inttoptr (i64 {make_room} to ptr)(i64 %bytes)
  %made = icmp ne i32 %answer, 0
  br i1 %made, label %yes, label %no
yes:
  ret i64 %bytes
no:
  ret i64 {refused}
}}

define void @allocate(ptr sret([4 x i64]) %out, ptr %self, i64 %bytes) uwtable {{
  %granted = call i64 @granted(i64 %bytes)
  call void inttoptr (i64 {original_allocate} to ptr)(
    ptr sret([4 x i64]) %out, ptr inttoptr (i64 {original} to ptr), i64 %granted)
  %data = load ptr, ptr %out
  %absent = icmp eq ptr %data, null
  br i1 %absent, label %done, label %insert
insert:
  %key = ptrtoint ptr %data to i64
  %first = call i64 @first_slot(ptr %data)
  br label %loop
loop:
  %probe = phi i64 [ 0, %insert ], [ %next, %taken ]
  %slot = call ptr @slot_address(i64 %first, i64 %probe)
  %exchange = cmpxchg ptr %slot, i64 0, i64 %key seq_cst seq_cst
  %won = extractvalue {{ i64, i1 }} %exchange, 1
  br i1 %won, label %store, label %taken
taken:
  %next = add i64 %probe, 1
  %more = icmp slt i64 %next, {probes}
  br i1 %more, label %loop, label %full
full:
  %uncounted = atomicrmw add ptr inttoptr (i64 {uncounted} to ptr), i64 1 seq_cst
  br label %done
store:
  %size_at = getelementptr i64, ptr %slot, i64 1
  store i64 %bytes, ptr %size_at
  %deleter_at = getelementptr i64, ptr %out, i64 {deleter_word}
  store ptr @release, ptr %deleter_at
  call void @record(i64 %bytes)
  br label %done
done:
  ret void
}}

define void @release(ptr %data) uwtable {{
  %key = ptrtoint ptr %data to i64
  %absent = icmp eq ptr %data, null
  br i1 %absent, label %done, label %search
search:
  %first = call i64 @first_slot(ptr %data)
  br label %loop
loop:
  %probe = phi i64 [ 0, %search ], [ %next, %other ]
  %slot = call ptr @slot_address(i64 %first, i64 %probe)
  %found = load atomic i64, ptr %slot seq_cst, align 8
  %mine = icmp eq i64 %found, %key
  br i1 %mine, label %remove, label %other
other:
  %next = add i64 %probe, 1
  %more = icmp slt i64 %next, {probes}
  br i1 %more, label %loop, label %done
remove:
  %size_at = getelementptr i64, ptr %slot, i64 1
  %bytes = load i64, ptr %size_at
  store atomic i64 0, ptr %slot seq_cst, align 8
  %minus = sub i64 0, %bytes
  call void @record(i64 %minus)
  br label %done
done:
  call void inttoptr (i64 {original_deleter} to ptr)(ptr %data)
  ret void
}}

define ptr @raw_deleter(ptr %self) {{
  ret ptr @release
}}
"""


def assemble(**constants: int) -> dict[str, int]:
    """The addresses of the three functions, compiled with these constants; they are never unloaded."""
    from llvmlite import binding  # type: ignore[import-untyped]

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    module = binding.parse_assembly(_ASSEMBLY.format(**constants))
    module.verify()
    machine = binding.Target.from_default_triple().create_target_machine(opt=2)
    engine = binding.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    addresses = {name: engine.get_function_address(name) for name in ("allocate", "release", "raw_deleter")}
    engine.detach()  # blocks may be freed after the interpreter is gone
    return addresses
