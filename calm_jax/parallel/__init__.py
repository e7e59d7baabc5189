"""Devices and processes: how arrays are sharded, and how several processes act as one command.

Begin with mesh.py, which has the table of sharding rules. constraints.py shards activations and weights inside a compiled
step, products.py multiplies them, and loops.py computes in blocks; devices.py has the accelerators' peak rates, and cpu.py the
CPU's instruction sets; host_memory.py makes the allocator keep freed memory where CPUs compute; compilation_cache.py turns on
JAX's compilation cache; startup.py, multihost.py and signals.py are for runs of several processes. May import cli and below.
"""
