# The tables of docs/findings/tasks.md: every mechanism on every task, and three short suites beside it. Stopped, each
# resumes with the same command.
.PHONY: tasks tasks-all tasks-pairs tasks-layer tasks-window
TASKS := runs/tasks
FOUR_PAIRS := mqar:length=64,pairs=4,keys=16,values=16,filler=8
tasks: tasks-all tasks-pairs tasks-layer tasks-window

tasks-all: $(READY)
	$(BIN)/headgate suite --out $(TASKS)/all
	$(BIN)/python studies/tasks/tables.py --publish all $(TASKS)/all

# Full attention on 4 pairs in 64 tokens and 16 in 256.
tasks-pairs: $(READY)
	$(BIN)/headgate suite full --tasks "$(FOUR_PAIRS) mqar:length=[64,256],pairs=[4,16],keys=16,values=16,filler=8" \
		--rates 0.01 --no-cost --out $(TASKS)/pairs train.steps=800
	$(BIN)/python studies/tasks/tables.py --publish pairs $(TASKS)/pairs

# What one layer can look up.
tasks-layer: $(READY)
	$(BIN)/headgate suite shifted --tasks "$(FOUR_PAIRS)" --seeds 3 --no-cost --out $(TASKS)/layer model.n_layers=1
	$(BIN)/python studies/tasks/tables.py --publish layer $(TASKS)/layer

# Windows that reach what is asked for, and others that do not.
tasks-window: $(READY)
	$(BIN)/headgate suite local:window=4 local:window=8 local:window=16 --rates 0.01 --no-cost --out $(TASKS)/window \
		--tasks "compress:tokens=11,alphabet=8 mqar:length=32,pairs=[2,4],keys=8,values=8,filler=8"
	$(BIN)/python studies/tasks/tables.py --publish window $(TASKS)/window
