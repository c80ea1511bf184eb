# The second study, of docs/findings.md; its protocol is studies/second/protocol.md. Stopped, every part resumes with the
# same command. WEB is web text and BOOKS long documents: files, folders or addresses that `headgate prepare` takes.
.PHONY: second second-text second-ladder second-shelf second-novels second-narrow second-again second-ablations \
	second-long second-test second-tables
SECOND := studies/second
SECOND_RUNS := runs/second
WEB ?= hf://datasets/HuggingFaceFW/fineweb/sample/10BT
BOOKS ?= $(WEB)
CONSTANT := near-far:gate=constant,opening=0.5,window=512@full times a constant
SPACE := train.learning_rate=0.004..0.025,train.attention_output_rate=0.25..4,model.rope_theta=30..1000
TUNING := --tune 6 --space "$(SPACE)"
# As far as the space was extended on text.
WIDER := train.learning_rate=0.004..0.025,train.attention_output_rate=0.25..4,model.rope_theta=8..1000
AS_BYTES := --tokenizer byte --splits 96/2/2 --max-tokens 17000000
LONG := "full:train.first_context=512@full, growing" "full:train.context=512,train.batch_size=4@full, short" \
	"local:window=64@window of 64" "short-path:train.first_context=512@short-path, growing"
NOVELS_AS_BYTES := --tokenizer byte --splits 84/14/2 --max-tokens 20000000
PAPERS := dynamic-sparse head-gated context-adaptive sparse-geometric
CONFIRMED := $(PAPERS) "$(CONSTANT)" short-path
SHELF := near-far gated sinks exclusive value-residual shifted forgetting short-path short-path:own-only
# What won in the part on text, as results/text/results.json has it: for full attention, for those that the recipe suited
# best, and for those that share a third trial.
OF_FULL := train.learning_rate=0.01257 train.attention_output_rate=2.16 model.rope_theta=34.52
OF_RECIPE := train.learning_rate=0.01,train.attention_output_rate=1.0,model.rope_theta=100.0
OF_OTHERS := train.learning_rate=0.01988,train.attention_output_rate=1.167,model.rope_theta=8.054
BEST := short-path:$(OF_RECIPE)@short-path dynamic-sparse:$(OF_RECIPE)@dynamic-sparse \
	"local:window=16,$(OF_RECIPE)@window of 16"
OTHERS := head-gated:$(OF_OTHERS)@head-gated context-adaptive:$(OF_OTHERS)@context-adaptive \
	sparse-geometric:$(OF_OTHERS)@sparse-geometric \
	"near-far:gate=constant,opening=0.5,window=512,$(OF_OTHERS)@full times a constant"
# The ablations of what differs when tuned again, at the settings that won there: these, as results/again/results.json has
# it, for dynamic-sparse, and the recipe for sparse-geometric.
AGAIN := train.learning_rate=0.01257,train.attention_output_rate=2.16,model.rope_theta=9.704
ABLATIONS_AGAIN := $(foreach part,no-gate fixed-window no-window,dynamic-sparse:$(part),$(AGAIN)@dynamic-sparse:$(part)) \
	$(foreach part,no-geometric fixed-pattern neither,sparse-geometric:$(part))
second: second-text second-ladder second-shelf second-novels second-narrow second-again second-ablations second-long \
	second-tables

$(SECOND_RUNS)/text-data/manifest.json: | $(READY)
	$(BIN)/headgate prepare "$(WEB)" $(SECOND_RUNS)/text-data $(AS_BYTES)

$(SECOND_RUNS)/novels-data/manifest.json: | $(READY)
	$(BIN)/headgate prepare "$(BOOKS)" $(SECOND_RUNS)/novels-data $(NOVELS_AS_BYTES)

# The confirmed contrasts: the four papers' mechanisms against full attention, and ours against full attention times a
# learned constant. All validation documents are judged by: 2% of the text.
TEXT_STUDY = $(BIN)/headgate compare $(CONFIRMED) --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data \
	--out $(SECOND_RUNS)/text --seeds 4 $(TUNING) --lengths 512,2048 --cost-seconds 0.5
second-text: $(SECOND_RUNS)/text-data/manifest.json
	$(TEXT_STUDY)

# Everything below is exploratory. What won on text, trained anew with the settings that won there; full attention and the
# best three at a quarter and at four times the budget too. Its runs open the test split.
second-ladder: $(SECOND_RUNS)/text-data/manifest.json
	$(BIN)/headgate compare $(BEST) $(OTHERS) --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data \
		--out $(SECOND_RUNS)/ladder --seeds 3 --no-controls --lengths 512 --cost-seconds 0.5 \
		--ladder 0.25,1,4 --ladder-variants short-path dynamic-sparse "window of 16" $(OF_FULL)

# The second shelf, and ours beside its ablation, at half the budget.
second-shelf: $(SECOND_RUNS)/text-data/manifest.json
	$(BIN)/headgate compare $(SHELF) --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data \
		--out $(SECOND_RUNS)/shelf --seeds 3 --tune 4 --space "$(WIDER)" --no-controls --no-cost \
		train.steps=250

# Another corpus; its split leaves five novels to judge by. Full attention at three budgets gives the price.
second-novels: $(SECOND_RUNS)/novels-data/manifest.json
	$(BIN)/headgate compare "$(CONSTANT)" short-path dynamic-sparse --recipe $(SECOND)/recipe.json \
		--data $(SECOND_RUNS)/novels-data --out $(SECOND_RUNS)/novels --seeds 4 $(TUNING) --no-published --no-controls \
		--lengths 512 --cost-seconds 0.5 --ladder 0.25,1,2

# Half the width.
second-narrow: $(SECOND_RUNS)/text-data/manifest.json
	$(BIN)/headgate compare short-path dynamic-sparse "local:window=16@window of 16" --recipe $(SECOND)/recipe.json \
		--data $(SECOND_RUNS)/text-data --out $(SECOND_RUNS)/narrow --seeds 3 --tune 4 --space "$(WIDER)" --no-published \
		--no-controls --no-cost model.d_model=64 model.n_heads=2 model.n_kv_heads=1 model.d_mlp=176

# The papers' mechanisms once more, on other seeds: every trial is trained on three of them, so that no seed's luck tunes.
second-again: $(SECOND_RUNS)/text-data/manifest.json
	$(BIN)/headgate compare $(PAPERS) short-path --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data \
		--out $(SECOND_RUNS)/again --seeds 5 --tune 6 --tuning-seeds 3 --space "$(WIDER)" --no-published \
		--no-controls --no-cost seed=104

# What differs there, taken apart, on the same seeds; the mechanisms themselves are in the part before.
second-ablations: $(SECOND_RUNS)/text-data/manifest.json
	$(BIN)/headgate compare $(ABLATIONS_AGAIN) --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data \
		--out $(SECOND_RUNS)/ablations --seeds 5 --no-controls --no-cost seed=104

# What a context of 8,192 bytes is worth in the same time, to somebody who could train on short sequences instead: full
# attention throughout, on sequences that grow from 512, and on 512 alone. Judged on the same five novels.
second-long: $(SECOND_RUNS)/novels-data/manifest.json
	$(BIN)/headgate compare $(LONG) --recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/novels-data \
		--out $(SECOND_RUNS)/long --seeds 3 --tune 4 --space "train.learning_rate=0.004..0.025,model.rope_theta=8..3000" \
		--no-published --no-controls --no-cost --budget seconds \
		train.context=8192 train.batch_size=1 train.steps=80 train.evaluate_every=20

# The test split, once, when everything else is done.
second-test: $(READY)
	$(BIN)/python $(SECOND)/tables.py --publish $(SECOND_RUNS)
	$(BIN)/python $(SECOND)/test_split.py $(SECOND_RUNS)/ladder $(SECOND)/results/ladder

second-tables: $(READY)
	$(BIN)/python $(SECOND)/tables.py --publish $(SECOND_RUNS)
