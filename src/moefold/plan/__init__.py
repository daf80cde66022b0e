"""The planner: what a mapping costs in time and memory, before it runs. Torch-free."""
