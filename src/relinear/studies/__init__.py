"""Studies: the tasks, measures and figures of one paper each, in one folder; scripts in ``results/`` run them."""
