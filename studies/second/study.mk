# The second study, of docs/findings.md; its protocol is studies/second/protocol.md. Stopped, every part resumes with the
# same command. WEB is web text: a file, a folder or an address that `headgate prepare` takes.
.PHONY: second second-text
SECOND := studies/second
SECOND_RUNS := runs/second
WEB ?= hf://datasets/HuggingFaceFW/fineweb/sample/10BT
CONSTANT := near-far:gate=constant,opening=0.5,window=512@full times a constant
TUNING := --tune 6 --space "train.learning_rate=0.004..0.025,train.attention_output_rate=0.25..4,model.rope_theta=30..1000"
second: second-text

# The confirmed contrasts: the four papers' mechanisms against full attention, and ours against full attention times a
# learned constant. All validation documents are judged by: 2% of the text.
second-text: $(READY)
	$(BIN)/headgate prepare "$(WEB)" $(SECOND_RUNS)/text-data --tokenizer byte --splits 96/2/2 --max-tokens 17000000
	$(BIN)/headgate compare dynamic-sparse head-gated context-adaptive sparse-geometric "$(CONSTANT)" short-path \
		--recipe $(SECOND)/recipe.json --data $(SECOND_RUNS)/text-data --out $(SECOND_RUNS)/text --seeds 4 $(TUNING) \
		--lengths 512,2048 --cost-seconds 0.5
