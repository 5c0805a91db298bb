"""The engine shows images to models with a vision tower, as transformers' own forward pass does."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from picture_toys import SEEING, draw, make_seeing_checkpoint, own_logprobs, written
from toy_engines import run_all
from transformers import AutoConfig, AutoModelForImageTextToText

from sharpen.contracts import GenerateRequest
from sharpen.engine.embedded.engine import EmbeddedEngine
from sharpen.errors import ImageError, SamplingError
from sharpen.models.images import eyes_of
from sharpen.types import Picture, PictureSpan, Sampling

IMAGE = "IMAGE"  # becomes what the family writes for one


@pytest.fixture(scope="module")
def seeing(tmp_path_factory, toy_model_dir):
    """Return the folder of a type's checkpoint, its eyes and transformers' own model."""
    made = {}

    def get(kind):
        if kind not in made:
            folder = make_seeing_checkpoint(kind, tmp_path_factory.mktemp(kind), toy_model_dir)
            own = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
            made[kind] = folder, eyes_of(folder, AutoConfig.from_pretrained(folder)), own
        return made[kind]

    return get


def asked(eyes, text, *pictures, seed=0, max_tokens=6):
    ids, spans = eyes.expand(text.replace(IMAGE, written(eyes)), pictures)
    sampling = Sampling(temperature=1.0, max_tokens=max_tokens)
    return GenerateRequest(prompt_ids=ids, sampling=sampling, noise=seed, pictures=spans)


def check(seeing, kind, requests, engine):
    """Compare what is sampled for requests with transformers, up to a sampled image token, which it would count as an
    image's."""
    _, eyes, own = seeing(kind)
    generations = run_all(engine, requests)
    for request, generation in zip(requests, generations, strict=True):
        images = np.flatnonzero(generation.ids == eyes.image_token_id)
        count = int(images[0]) if len(images) else len(generation.ids)
        whole = np.concatenate([request.prompt_ids, generation.ids[:count]])
        start = len(request.prompt_ids)
        expected = own_logprobs(own, eyes, whole, request.pictures, range(start, len(whole))).detach()
        np.testing.assert_allclose(generation.logprobs[:count], expected, atol=2e-4)
    return generations


DENSE = [kind for kind in SEEING if kind != "qwen3_5_moe"]


@pytest.mark.parametrize("kind", SEEING)
def test_what_is_sampled_is_what_transformers_computes_from_the_pixels(seeing, kind):
    """Wide and high images, several, first and last in the prompt."""
    folder, eyes, _ = seeing(kind)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384)
    requests = [
        asked(eyes, f"what is {IMAGE}?", draw(1, 40, 16)),
        asked(eyes, f"{IMAGE}{IMAGE} or this? {IMAGE}", draw(2, 16, 40), draw(1, 40, 16), draw(3, 24, 24)),
        asked(eyes, f"look: {IMAGE}", draw(4), seed=3),
    ]
    check(seeing, kind, requests, engine)


@pytest.mark.parametrize("kind", DENSE)
def test_another_image_with_the_same_token_ids_is_not_taken_for_the_first(seeing, kind):
    """One after the other: KV and recurrent states of the first are cached. Both at once: neither waits for the other's
    beginning. The first again: reused."""
    folder, eyes, _ = seeing(kind)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384)
    text = f"{IMAGE} what is it, and why is it so?"
    first, second = asked(eyes, text, draw(1)), asked(eyes, text, draw(2))
    assert first.prompt_ids.tolist() == second.prompt_ids.tolist()
    for requests in ([first], [second], [asked(eyes, text, draw(3)), asked(eyes, text, draw(4))]):
        check(seeing, kind, requests, engine)
    assert engine.stats.reused_tokens < 5 * len(first.prompt_ids) / 4
    before = engine.stats.computed_tokens
    check(seeing, kind, [first], engine)
    assert engine.stats.computed_tokens - before < len(first.prompt_ids) / 2


@pytest.mark.parametrize("kind", DENSE)
def test_a_later_turn_with_another_image_continues_and_decodes_at_the_models_positions(seeing, kind):
    folder, eyes, _ = seeing(kind)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384)
    first = asked(eyes, f"what is {IMAGE}?", draw(1, 48, 16), max_tokens=12)
    (generation,) = check(seeing, kind, [first], engine)
    more, spans = eyes.expand(f" and {written(eyes)}?", [draw(2, 16, 48)])
    sampled = np.where(generation.ids == eyes.image_token_id, 5, generation.ids)  # transformers would count it
    before = np.concatenate([first.prompt_ids, sampled])
    (span,) = spans
    later = PictureSpan(picture=span.picture, start=len(before) + span.start, length=span.length)
    request = GenerateRequest(
        prompt_ids=np.concatenate([before, more]),
        sampling=first.sampling,
        noise=1,
        pictures=(*first.pictures, later),
    )
    computed = engine.stats.computed_tokens
    check(seeing, kind, [request], engine)
    assert engine.stats.computed_tokens - computed < len(more) + len(generation.ids)


@pytest.mark.parametrize("kind", DENSE)
def test_the_members_of_a_group_pass_their_image_through_the_tower_once(seeing, kind):
    folder, eyes, _ = seeing(kind)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    engine = EmbeddedEngine(model, max_model_len=384)
    shown = []
    tower = getattr(model.model, "visual", None) or model.model.vision_tower
    tower.register_forward_hook(lambda *_: shown.append(1))
    requests = [asked(eyes, f"what is {IMAGE}?", draw(1, 48, 16), seed=seed) for seed in range(4)]
    check(seeing, kind, requests, engine)
    asyncio.run(engine.load(1, engine.weights()))
    check(seeing, kind, requests, engine)
    assert len(shown) == 1


@pytest.mark.parametrize("kind", DENSE)
def test_a_job_that_is_suspended_and_chunks_of_a_prompt_see_the_same(seeing, kind):
    folder, eyes, _ = seeing(kind)
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384)
    engine._stepper.prompt_tokens_per_step = 7  # within an image
    requests = [asked(eyes, f"{IMAGE}what is {IMAGE}?", draw(s, 40, 24), draw(9), seed=s) for s in range(3)]
    suspended = []

    def told(ids):
        if not suspended:
            suspended.append(1)
            engine._scheduler.suspend_all()

    requests[0] = replace(requests[0], on_tokens=lambda ids: asyncio.get_running_loop().call_soon(told, ids))
    check(seeing, kind, requests, engine)
    assert suspended


@pytest.mark.parametrize("kind", ["gemma3", "gemma4"])
def test_images_that_attend_both_ways_are_refused_in_the_deterministic_mode_and_at_the_end(seeing, kind):
    folder, eyes, _ = seeing(kind)
    request = asked(eyes, f"what is {IMAGE}?", draw(1))
    fixed = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384, deterministic=True)
    with pytest.raises(SamplingError, match="set deterministic to false"):
        run_all(fixed, [request])
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=384)
    with pytest.raises(SamplingError, match="not where an image may be"):
        run_all(engine, [replace(request, prompt_ids=request.prompt_ids[: request.pictures[0].stop])])


def test_in_the_deterministic_mode_neighbours_change_nothing(seeing):
    folder, eyes, _ = seeing("qwen3_vl")
    requests = [asked(eyes, f"what is {IMAGE}?", draw(s), seed=s) for s in range(3)]
    alone = [
        run_all(EmbeddedEngine.from_pretrained(str(folder), max_model_len=128, deterministic=True), [request])[0]
        for request in requests
    ]
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=128, deterministic=True)
    together = check(seeing, "qwen3_vl", requests[::-1], engine)[::-1]
    assert [one.logprobs.tolist() for one in alone] == [one.logprobs.tolist() for one in together]


def test_image_tokens_of_no_image_are_tokens_like_others(seeing):
    """A model may sample them, and a user may write them."""
    folder, eyes, own = seeing("qwen3_vl")
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=128)
    ids = np.array([5, eyes.image_token_id, eyes.image_token_id, 9], np.int32)
    request = GenerateRequest(prompt_ids=ids, sampling=Sampling(temperature=1.0, max_tokens=4), noise=0)
    (generation,) = run_all(engine, [request])
    whole = torch.from_numpy(np.concatenate([ids, generation.ids]))[None].long()
    with torch.no_grad():
        logits = own(input_ids=whole, position_ids=torch.arange(whole.shape[1])[None]).logits[0]
    expected = logits.log_softmax(-1)[torch.arange(3, 3 + len(generation.ids)), torch.from_numpy(generation.ids).long()]
    np.testing.assert_allclose(generation.logprobs, expected, atol=2e-4)


def spoiled(request, **changes):
    (span,) = request.pictures
    fields = {"picture": span.picture, "start": span.start, "length": span.length, **changes}
    return replace(request, pictures=(PictureSpan(**fields),))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"start": 0}, SamplingError, "not where an image may be"),
        ({"length": 3}, SamplingError, "are 3, but those of their image are 4"),
        ({"length": 900}, SamplingError, "not where an image may be"),
        ({"picture": draw(1, 48, 16)}, SamplingError, "are 4, but those of their image are 12"),
        ({"picture": Picture.of(b"nothing")}, ImageError, "no image"),
    ],
)
def test_pictures_that_are_not_where_the_ids_say_fail_their_own_call(seeing, changes, error, message):
    folder, eyes, _ = seeing("qwen3_vl")
    engine = EmbeddedEngine.from_pretrained(str(folder), max_model_len=128)
    request = asked(eyes, f"what is {IMAGE}?", draw(1))
    with pytest.raises(error, match=message):
        run_all(engine, [spoiled(request, **changes)])
    check(seeing, "qwen3_vl", [request], engine)


def test_a_model_without_a_tower_says_so(seeing, toy_model_dir):
    _, eyes, _ = seeing("qwen3_vl")
    engine = EmbeddedEngine.from_pretrained(str(toy_model_dir), max_model_len=128)
    request = asked(eyes, IMAGE, draw(1))
    with pytest.raises(SamplingError, match="Qwen3ForCausalLM sees no images"):
        run_all(engine, [replace(request, prompt_ids=request.prompt_ids % 9)])
