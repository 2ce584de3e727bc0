"""Starting runs: ranks by torchrun's agent, SLURM jobs, sizes that follow from the machines, a test of a cluster."""
