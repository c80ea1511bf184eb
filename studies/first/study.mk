# The first study, of docs/findings/first.md: about three hours on two cores. Stopped, it resumes with the same command. TEXT is
# web text, NOVELS long documents: files, folders or addresses that `headgate prepare` takes.
.PHONY: study study-text study-late study-start study-recall study-long
FIRST := studies/first
STUDY := runs/study
TEXT ?= hf://datasets/HuggingFaceFW/fineweb/sample/10BT
NOVELS ?= $(TEXT)
SEEDS ?= 5
LONG_SEEDS ?= 3
SETTINGS ?=
# It had no controls but those it names, and judged over the seeds alone.
AS_IT_WAS := --no-controls train.document_tokens=16384
TOKENS := --tokenizer bpe:2048 --max-tokens 6000000
RECALL := recall:context=256,pairs=8,queries=8,keys=8,values=4,noise=4,sequences=10000,joined=true
PAPERS := dynamic-sparse head-gated context-adaptive sparse-geometric
MECHANISMS ?= $(PAPERS) near-far sparse-geometric:gate=log local combiner positional local:window=0
ABLATIONS ?= dynamic-sparse:no-gate dynamic-sparse:fixed-window dynamic-sparse:no-window \
	head-gated:no-gate head-gated:local-only head-gated:global-only \
	context-adaptive:no-gate context-adaptive:local-only context-adaptive:global-only context-adaptive:fixed-width \
	sparse-geometric:no-geometric sparse-geometric:fixed-pattern sparse-geometric:neither \
	near-far:no-gate near-far:constant-gate near-far:half-open near-far:near-only near-far:gate=constant,window=1024
# Of recall alone: far heads that reach half of its context.
SHORT_REACH ?= near-far:stretch=4
study: study-text study-recall study-start study-long

# Loss at equal tokens, and cost, of every mechanism and ablation.
study-text: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare $(MECHANISMS) $(ABLATIONS) --recipe $(FIRST)/recipe.json --data $(STUDY)/text-data \
		--out $(STUDY)/text --seeds $(SEEDS) --lengths 1024 --cost-seconds 0.3 $(AS_IT_WAS) $(SETTINGS)

# Four times the tokens, at which attention pays by itself; not a part of `make study`: another hour.
study-late: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare near-far local:window=0 dynamic-sparse head-gated near-far:gate=constant,window=1024 \
		near-far:constant-gate near-far:near-only --recipe $(FIRST)/recipe.json \
		--data $(STUDY)/text-data --out $(STUDY)/late --seeds 4 --no-cost \
		train.steps=1000 train.warmup_steps=100 train.evaluate_every=100 $(AS_IT_WAS) $(SETTINGS)

# The same from a start that suits plain attention: embeddings that are large beside what attention adds to them.
study-start: $(READY)
	$(BIN)/headgate prepare "$(TEXT)" $(STUDY)/text-data $(TOKENS)
	$(BIN)/headgate compare dynamic-sparse near-far local:window=0 --recipe $(FIRST)/recipe.json \
		--data $(STUDY)/text-data --out $(STUDY)/start --seeds $(SEEDS) --no-cost \
		model.tied_embeddings=false model.embedding_deviation=1 $(AS_IT_WAS) $(SETTINGS)

# What each can recall, by distance.
study-recall: $(READY)
	$(BIN)/headgate prepare $(RECALL) $(STUDY)/recall-data
	$(BIN)/headgate compare $(MECHANISMS) $(ABLATIONS) $(SHORT_REACH) --recipe $(FIRST)/recall-recipe.json --data $(STUDY)/recall-data \
		--out $(STUDY)/recall --seeds $(SEEDS) --no-cost $(AS_IT_WAS) $(SETTINGS)

# Long documents at equal seconds, not tokens.
study-long: $(READY)
	$(BIN)/headgate prepare "$(NOVELS)" $(STUDY)/long-data $(TOKENS)
	$(BIN)/headgate compare dynamic-sparse local head-gated context-adaptive:select=block near-far --recipe $(FIRST)/recipe.json \
		--data $(STUDY)/long-data --out $(STUDY)/long --seeds $(LONG_SEEDS) --budget seconds --no-cost \
		train.context=8192 train.steps=24 train.warmup_steps=3 train.evaluate_every=12 train.evaluate_tokens=65536 \
		$(AS_IT_WAS) $(SETTINGS)
