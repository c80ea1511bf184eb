# The tables of docs/findings/tasks.md: every mechanism on every task, in four parts, and four short suites beside it.
# Stopped, each resumes with the same command, which also adds mechanisms registered since.
.PHONY: tasks tasks-all tasks-patterns tasks-lookups tasks-mqar tasks-needle tasks-added tasks-speed tasks-pairs tasks-layer tasks-window tasks-state
TASKS := runs/tasks
FOUR_PAIRS := mqar:length=64,pairs=4,keys=16,values=16,filler=8
tasks: tasks-all tasks-pairs tasks-layer tasks-window tasks-state
tasks-all: tasks-patterns tasks-lookups tasks-mqar tasks-needle

tasks-patterns: $(READY)
	$(BIN)/headgate suite --tasks "compress copy fuzzy-recall markov" --seeds 2 --out $(TASKS)/patterns
	$(BIN)/python studies/tasks/tables.py --publish patterns $(TASKS)/patterns

# Costs are those of the first part.
tasks-lookups: $(READY)
	$(BIN)/headgate suite --tasks "recall noisy-recall memorise" --seeds 2 --no-cost --out $(TASKS)/lookups
	$(BIN)/python studies/tasks/tables.py --publish lookups $(TASKS)/lookups

tasks-mqar: $(READY)
	$(BIN)/headgate suite --tasks mqar --seeds 2 --no-cost --out $(TASKS)/mqar
	$(BIN)/python studies/tasks/tables.py --publish mqar $(TASKS)/mqar

tasks-needle: $(READY)
	$(BIN)/headgate suite --tasks needle --seeds 2 --no-cost --out $(TASKS)/needle
	$(BIN)/python studies/tasks/tables.py --publish needle $(TASKS)/needle

# Where the runs of the parts are gone and only their results are left, a new mechanism need not wait for all others to
# be trained again: make tasks-added ADDED="name other".
tasks-added: $(READY)
	$(BIN)/headgate suite $(or $(ADDED),$(error name the mechanisms in ADDED)) --seeds 2 --out $(TASKS)/added
	$(BIN)/python studies/tasks/tables.py --publish added $(TASKS)/added

# Their speeds, beside full attention's, on the task of the first part's costs.
tasks-speed: $(READY)
	$(BIN)/headgate suite $(or $(ADDED),$(error name the mechanisms in ADDED)) --tasks compress --seeds 2 --out $(TASKS)/speed
	$(BIN)/python studies/tasks/tables.py --publish speed $(TASKS)/speed

# Full attention on 4 pairs in 64 tokens and 16 in 256. The loss is a mean over answers, and a long sample has four times
# as many: with one short sample to a long one, some seeds never leave the plateau; with three, all do.
tasks-pairs: $(READY)
	$(BIN)/headgate suite full --tasks \
		"$(FOUR_PAIRS) mqar:length=[64,256],pairs=[4,16],shares=[3,1],keys=16,values=16,filler=8" \
		--seeds 10 --rates 0.01 --no-cost --out $(TASKS)/pairs train.steps=800
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

# A recurrence keeps one square matrix a head, however many pairs it is shown: here one head of 16 dimensions.
tasks-state: $(READY)
	$(BIN)/headgate suite gated-delta --tasks mqar --seeds 3 --no-cost --out $(TASKS)/state \
		model.n_heads=1 model.n_kv_heads=1 model.head_dim=16
	$(BIN)/python studies/tasks/tables.py --publish state $(TASKS)/state
