"""Named starting points: functions that derive from one another; `config.override` changes any setting."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from headgate import files
from headgate.config import Config, ModelConfig, TrainConfig, load
from headgate.registry import Registry


@dataclass(frozen=True)
class Recipe:
    make: Callable[[], Config]
    parameters: int
    """Parameters of the model with mechanism `full`; a test builds it and counts."""

    @property
    def summary(self) -> str:
        return (self.make.__doc__ or "").strip().splitlines()[0]


RECIPES: Registry[Recipe] = Registry("recipe")


def recipe(name: str, *, parameters: int) -> Callable[[Callable[[], Config]], Callable[[], Config]]:
    def add(make: Callable[[], Config]) -> Callable[[], Config]:
        RECIPES.register(name)(Recipe(make, parameters))
        return make

    return add


def get_recipe(name: str) -> Config:
    return RECIPES.get(name).make()


def named_config(recipe: str) -> Config:
    """A recipe by its name, or the config in a file."""
    if recipe.endswith(".json") or files.kind(recipe) not in ("missing", "a folder"):
        return load(Config, recipe)
    return get_recipe(recipe)


@recipe("tiny", parameters=1_262_976)
def tiny() -> Config:
    """A minute on two CPU cores; windows scaled so that they matter at a context of 256."""
    return Config(
        model=ModelConfig(
            vocab_size=4096,
            d_model=128,
            n_layers=4,
            n_heads=4,
            n_kv_heads=2,
            head_dim=32,
            d_mlp=352,
            shared_options={"window": 32, "max_window": 64, "dense_prefix": 64, "block": 16, "stride": 16},
        ),
        train=TrainConfig(
            context=256,
            documents="mask",
            batch_size=8,
            steps=300,
            learning_rate=2e-3,
            warmup_steps=30,
            final_learning_rate=0.1,
            evaluate_every=30,
            evaluate_tokens=16_384,
        ),
    )


@recipe("task", parameters=115_136)
def task() -> Config:
    """Two layers of width 64 for a synthetic task, learnt in seconds: what `headgate suite` trains."""
    return Config(
        model=ModelConfig(
            vocab_size=256,
            d_model=64,
            n_layers=2,
            n_heads=2,
            n_kv_heads=2,
            head_dim=32,
            d_mlp=128,
            tied_embeddings=False,
            start="scaled",
            rope_theta=100.0,
            shared_options={"window": 16, "max_window": 32, "dense_prefix": 16, "block": 8, "stride": 8},
        ),
        train=TrainConfig(
            context=128,
            batch_size=16,
            steps=400,
            learning_rate=1e-2,
            optimizer="muon",
            warmup_share=0.05,
            final_learning_rate=0.1,
            evaluate_every=25,
            evaluate_tokens=8192,
        ),
    )


@recipe("small", parameters=6_819_840)
def small() -> Config:
    """An hour on a laptop, minutes on a GPU."""
    base = tiny()
    return replace(
        base,
        model=replace(
            base.model,
            vocab_size=8192,
            d_model=256,
            n_layers=6,
            n_kv_heads=2,
            head_dim=64,
            d_mlp=768,
            shared_options={"window": 128, "max_window": 256, "dense_prefix": 256, "block": 32, "stride": 32},
        ),
        train=replace(
            base.train,
            context=1024,
            batch_size=4,
            steps=2000,
            learning_rate=1e-3,
            warmup_steps=100,
            evaluate_every=500,
            evaluate_tokens=65_536,
        ),
    )


@recipe("paper-134m", parameters=134_234_368)
def paper_134m() -> Config:
    """134M parameters, trained as the sparse-geometric paper says: 50,000 steps of 32 sequences."""
    return Config(
        model=ModelConfig(
            vocab_size=151_936, d_model=512, n_layers=14, n_heads=12, n_kv_heads=12, head_dim=64, d_mlp=1600
        ),
        train=TrainConfig(
            context=2048, batch_size=32, steps=50_000, learning_rate=6e-4, warmup_steps=500, precision="bf16"
        ),
    )


@recipe("paper-134m-context-adaptive", parameters=134_234_368)
def paper_134m_context_adaptive() -> Config:
    """The same model, trained as the context-adaptive paper says: 512 sequences per step by accumulation."""
    base = paper_134m()
    train = replace(base.train, accumulation=16, steps=9_537, learning_rate=3e-4, betas=(0.9, 0.98))
    return replace(base, train=train)


@recipe("paper-1.5b", parameters=1_543_664_128)
def paper_1_5b() -> Config:
    """The sizes and training given in the dynamic-sparse paper: 1.5B parameters, not its stated 134M."""
    return Config(
        model=ModelConfig(
            vocab_size=151_936, d_model=1536, n_layers=28, n_heads=12, n_kv_heads=2, head_dim=128, d_mlp=8960
        ),
        train=TrainConfig(
            context=32_768,
            batch_size=32,
            accumulation=16,
            steps=399,
            learning_rate=3e-4,
            weight_decay=0.1,
            warmup_steps=20,
            precision="bf16",
            evaluate_every=50,
            evaluate_tokens=1 << 20,
        ),
    )
