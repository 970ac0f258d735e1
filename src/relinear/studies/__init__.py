"""Studies: the tasks, measures and figures of one paper each, in one folder; scripts in ``examples/`` run them."""
