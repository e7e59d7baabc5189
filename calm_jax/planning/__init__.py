"""Plans the memory and time of training and generation on hardware that this machine lacks, by compiling for it on a CPU.

Begin with planner.py, for generation with generation.py; fitting.py chooses what a step keeps in memory, topology.py lists
the hardware, hlo.py and memory_traffic.py read the compiled program, result.py has the finished plan, report.py prints it.
May import cost, build, config, training and everything below them.
"""
