"""Every supported architecture, packed == separate, on any transformers: `pytest tests/test_architectures.py`.

The reference is transformers' own model with its own eager attention, one sequence at a time, nothing cached.
"""

import pytest
import torch
from models import (
    CONFIGS,
    Adapter,
    MixtureSpec,
    Probe,
    by_definition,
    greedy_tokens_agree,
    random_ids,
    save_base,
    tiny_model,
)
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from workbench import Engine, UserError
from workbench.engine.batch import ADAPTED
from workbench.engine.hf import SUPPORTED

TOLERANCE = 1e-5
LENGTHS = (1, 3, 9, 20)  # one row, less than the window of 6, more than it, more than two chunks of 8
NEW_TOKENS = 5


LINEAR = {"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 32}
# other shapes that checkpoints of these architectures come in
VARIANTS = [
    ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    ("llama", {"num_key_value_heads": 1, "rope_parameters": YARN}),
    ("qwen2", {"rope_parameters": LINEAR}),
    ("opt", {"word_embed_proj_dim": 16, "do_layer_norm_before": False}),
    ("opt", {"enable_bias": False, "layer_norm_elementwise_affine": False}),
    ("gpt2", {"reorder_and_upcast_attn": True, "scale_attn_weights": False}),
    ("gpt_neox", {"use_parallel_residual": True, "tie_word_embeddings": True}),
]


@pytest.mark.parametrize(("kind", "changes"), [*((kind, {}) for kind in SUPPORTED), *VARIANTS])
def test_packed_rows_equal_each_sequence_alone(kind, changes, tmp_path):
    model = tiny_model(kind, **changes)
    engine = Engine(save_base(model, tmp_path), max_rows_per_step=8)
    prompts = [random_ids(length, seed=length) for length in LENGTHS]
    probe = Probe(engine)
    completions = engine.generate(prompts, max_tokens=NEW_TOKENS, ignore_eos=True)
    assert max(len({owner for owner, *_ in batch}) for batch in probe.batches) == len(LENGTHS), "nothing was packed"
    assert any(first and rows > 1 for batch in probe.batches for _, _, first, rows in batch), "no prefill was chunked"
    for prompt, done in zip(prompts, completions, strict=True):
        ids = [*prompt, *done.token_ids]
        reference = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False, output_hidden_states=True)
        ours = probe.decoded(done.request_id, len(prompt) - 1, NEW_TOKENS)
        theirs = reference.logits[0, len(prompt) - 1 :]
        assert (ours - theirs).abs().max() < TOLERANCE
        assert greedy_tokens_agree(done.token_ids, theirs)
        hidden = torch.stack([probe.hidden[done.request_id, ADAPTED, at] for at in range(len(ids) - 1)])
        assert (hidden - reference.hidden_states[-1][0]).abs().max() < TOLERANCE


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.filterwarnings("ignore:the mixture was made for base")
def test_a_mixture_equals_its_definition(kind, tmp_path):
    """Every linear module but the head carries deltas, in the scaling pass too; two requests decode in small steps."""
    model = tiny_model(kind)
    adapters = {"a": Adapter("all-linear", seed=1), "b": Adapter("all-linear", rank=2, seed=2)}
    spec = MixtureSpec(adapters, {"layerwise_scalings": True, "scaling_pass_value": 0.3})
    engine = Engine(save_base(model, tmp_path / "tiny"), max_rows_per_step=8)
    engine.load_mixture(spec.write(tmp_path / "m", model), "m")
    probe, recorder = Probe(engine), engine.record("scalings")
    prompts = [random_ids(length, seed=length) for length in (11, 3)]
    for prompt, done in zip(
        prompts, engine.generate(prompts, mixture="m", max_tokens=NEW_TOKENS, ignore_eos=True), strict=True
    ):
        logits, scalings = by_definition(model, spec, [*prompt, *done.token_ids[:-1]])
        ours = probe.decoded(done.request_id, len(prompt) - 1, NEW_TOKENS)
        assert (ours - logits[len(prompt) - 1 :]).abs().max() < TOLERANCE
        values = torch.from_numpy(recorder.trace(done.request_id).values[:-1])
        assert (values - scalings).abs().max() < TOLERANCE


def test_every_supported_architecture_has_settings():
    assert set(CONFIGS) == set(SUPPORTED)


# settings that a packed forward could lose, one at a time: setting -> its neutral value
TRAPS = {
    "gemma2": {"final_logit_softcapping": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": 12,
               "sliding_window": 64},
    "gemma3_text": {"final_logit_softcapping": None, "query_pre_attn_scalar": 12, "sliding_window": 64},
    "cohere": {"logit_scale": 1.0, "use_qk_norm": False},
    "granite": {"logits_scaling": 1.0, "attention_multiplier": 8**-0.5, "residual_multiplier": 1.0,
                "embedding_multiplier": 1.0},
    "mistral": {"sliding_window": None},
    "mixtral": {"sliding_window": None},
    "phi3": {"sliding_window": None},
    "starcoder2": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "qwen3": {"use_sliding_window": False, "sliding_window": None, "layer_types": ["full_attention"] * 2},
    "qwen3_moe": {"use_sliding_window": False, "norm_topk_prob": False},
    "smollm3": {"no_rope_layers": [1, 1], "sliding_window": 64},
    "gpt2": {"scale_attn_by_inverse_layer_idx": False},
    "gpt_neox": {"use_parallel_residual": True},
}  # fmt: skip


@pytest.mark.parametrize(("kind", "setting"), [(kind, setting) for kind in TRAPS for setting in TRAPS[kind]])
def test_the_tiny_models_feel_their_settings(kind, setting):
    """The comparison above proves nothing about a setting that would not change these models' logits."""
    window = ("use_sliding_window", "sliding_window", "layer_types")  # they are one setting in three keys
    neutral = {key: value for key, value in TRAPS[kind].items() if key == setting or {key, setting} <= {*window}}
    ids = torch.tensor([random_ids(20)])
    with_setting = tiny_model(kind)(input_ids=ids).logits
    without = tiny_model(kind, **neutral)(input_ids=ids).logits
    assert (with_setting - without).abs().max() > 100 * TOLERANCE


def test_head_dropout_and_training_mode_are_off(tmp_path):
    engine = Engine(save_base(tiny_model("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5), tmp_path))
    prompt = random_ids(7)
    assert engine.generate(prompt, max_tokens=4).logprobs == engine.generate(prompt, max_tokens=4).logprobs


LONG = {
    "rope_type": "longrope", "rope_theta": 100.0, "partial_rotary_factor": 1.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 3.0, 4.0, 5.0],
    "original_max_position_embeddings": 16,
}  # fmt: skip


def long_rope_model():
    return tiny_model("phi3", rope_parameters=LONG, original_max_position_embeddings=16, sliding_window=None)


@pytest.mark.parametrize(("max_len", "factors", "length"), [(16, "short", 8), (128, "long", 20)])
def test_longrope_is_fixed_by_max_len_and_says_so(tmp_path, max_len, factors, length):
    model = long_rope_model()
    engine = Engine(save_base(model, tmp_path), max_len=max_len)
    assert any(f"{factors} factors" in note and str(max_len) in note for note in engine.model.notes)
    prompt = random_ids(length)
    probe = Probe(engine)
    done = engine.generate(prompt, max_tokens=1)
    theirs = model(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert (probe.logits[done.request_id, ADAPTED, length - 1] - theirs).abs().max() < TOLERANCE


def test_a_long_neighbour_changes_no_logits_under_longrope(tmp_path):
    """In transformers the packed batch's largest position picks the factors of every row in it."""
    engine = Engine(save_base(long_rope_model(), tmp_path))
    short, long = random_ids(5), random_ids(60, seed=1)
    probe = Probe(engine)
    alone = engine.generate(short, max_tokens=3)
    together = engine.generate([short, long], max_tokens=3)[0]
    for position in range(4, 7):
        one, other = (probe.logits[done.request_id, ADAPTED, position] for done in (alone, together))
        assert (one - other).abs().max() < TOLERANCE


def test_dynamic_rope_is_refused_by_name(tmp_path):
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 100.0}
    save_base(tiny_model("llama", rope_parameters=rope), tmp_path / "tiny-dynamic")
    with pytest.raises(UserError, match=r"'tiny-dynamic' uses 'dynamic' RoPE scaling"):
        Engine(tmp_path / "tiny-dynamic")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("bloom", {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 97}),
        ("falcon", {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 97}),
        ("mamba", {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 97}),
    ],
)
def test_an_architecture_that_does_not_pack_is_refused_by_name(tmp_path, kind, settings):
    config = CONFIG_MAPPING[kind](**settings, bos_token_id=0, eos_token_id=1, pad_token_id=0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=rf"is a '{kind}' model, which is not supported.*Supported: llama, mistral"):
        Engine(tmp_path)


def test_bidirectional_attention_is_refused(tmp_path):
    save_base(tiny_model("gemma3_text", use_bidirectional_attention=True), tmp_path)
    with pytest.raises(UserError, match="use_bidirectional_attention"):
        Engine(tmp_path)
