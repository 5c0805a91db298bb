"""Images become the tokens and tensors that the model's own processor makes of them."""

import io

import numpy as np
import pytest
from picture_toys import ENTITIES, SEEING, bomb, draw, make_seeing_checkpoint, moving, with_scans, written
from PIL import Image, ImageOps
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from sharpen.errors import ImageError, ModelError
from sharpen.models.images import MAX_PIXELS, MAX_SCANS, eyes_of, open_image
from sharpen.models.sight import Sight
from sharpen.types import Picture

QUESTION = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>what? <|vision_start|><|image_pad|><|vision_end|>"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, toy_model_dir):
    return make_seeing_checkpoint("qwen3_vl", tmp_path_factory.mktemp("seeing"), toy_model_dir)


@pytest.fixture(scope="module")
def eyes(folder):
    return eyes_of(folder, AutoConfig.from_pretrained(folder))


class OwnProcessor(Qwen3VLProcessor):
    """Transformers' processor, with no part for videos (which needs torchvision)."""

    def check_argument_for_proper_class(self, name, argument):
        return None if argument is None else super().check_argument_for_proper_class(name, argument)


def test_the_ids_and_tensors_are_those_of_the_models_own_processor(folder, eyes):
    pictures = [draw(1, 16, 16), draw(2, 40, 24)]
    processor = OwnProcessor(
        AutoImageProcessor.from_pretrained(folder, backend="pil"), AutoTokenizer.from_pretrained(folder), None
    )
    own = processor(
        text=QUESTION, images=[open_image(p.data) for p in pictures], add_special_tokens=False, return_tensors="pt"
    )
    ids, spans = eyes.expand(QUESTION, pictures)
    assert ids.tolist() == own["input_ids"][0].tolist()
    inside = np.zeros(len(ids), int)
    for span in spans:
        inside[span.start : span.stop] = 1
    assert inside.tolist() == own["mm_token_type_ids"][0].tolist()
    assert [(span.picture, span.length) for span in spans] == [(pictures[0], 4), (pictures[1], 15)]
    features = [eyes.features(picture) for picture in pictures]
    assert np.concatenate([f["pixel_values"] for f in features]).tolist() == own["pixel_values"].tolist()
    assert [f["image_grid_thw"][0].tolist() for f in features] == own["image_grid_thw"].tolist()


def test_mistral_3_has_a_token_at_the_end_of_each_row(tmp_path, toy_model_dir):
    """As its processor writes them, which needs torchvision: `[IMG]` by rows, `[IMG_BREAK]` between, `[IMG_END]`."""
    folder = make_seeing_checkpoint("mistral3", tmp_path, toy_model_dir)
    eyes = eyes_of(folder, AutoConfig.from_pretrained(folder))
    assert eyes.expand_text("a[IMG]b", [draw(1, 24, 16)]) == ("a[IMG][IMG][IMG][IMG_BREAK][IMG][IMG][IMG][IMG_END]b")
    ids, ((span),) = eyes.expand("a[IMG]b", [draw(1, 24, 16)])
    assert (span.length, eyes.num_tokens(span.picture)) == (7, 6)
    assert ids[span.start] == ids[span.stop - 1] == eyes.image_token_id
    sizes = eyes.features(draw(2, 128, 64))["image_sizes"]  # at most 64 pixels, a multiple of 8
    assert sizes.tolist() == [[32, 64]]


@pytest.mark.parametrize("pictures", [[], [draw(1)], [draw(1)] * 3])
def test_placeholders_and_pictures_must_be_as_many(eyes, pictures):
    with pytest.raises(ImageError, match=f"2 times .* for {len(pictures)} images"):
        eyes.expand(QUESTION, pictures)


def test_image_tokens_of_no_picture_are_noticed(eyes):
    ids, _ = eyes.expand(QUESTION, [draw(1), draw(2)])
    with pytest.raises(ImageError, match="8 image tokens, but its images are 4"):
        eyes.spans(ids, [draw(1)])


def saved(image, kind, **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "P"])
def test_every_format_and_mode_is_read(eyes, kind, mode):
    image = Image.new("RGB", (20, 12), (200, 10, 10)).convert(mode)
    if kind in ("JPEG", "WEBP") and mode == "P":
        image = image.convert("RGB")
    assert eyes.features(Picture.of(saved(image, kind)))["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_a_photograph_is_turned_as_its_camera_says():
    exif = Image.Exif()
    exif[0x0112] = 6
    assert open_image(saved(Image.new("RGB", (20, 12)), "JPEG", exif=exif)).size == (12, 20)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_orientation_is_turned_as_pillow_does(orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = saved(Image.open(io.BytesIO(draw(3, 24, 16).data)).convert("RGB"), "PNG", exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(expected))


def test_a_photograph_whose_exif_is_damaged_is_read():
    """Its resolution is a text. Red when the EXIF is written anew, as Pillow's own turning does."""
    exif = Image.Exif()
    exif[0x0112] = 6
    exif[0x010E] = "abcd"
    data = saved(Image.new("RGB", (20, 12)), "JPEG", exif=exif)
    data = data.replace(b"\x01\x0e\x00\x02", b"\x01\x1a\x00\x02").replace(b"\x0e\x01\x02\x00", b"\x1a\x01\x02\x00")
    with pytest.raises(TypeError):
        ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert open_image(data).size == (12, 20)


def test_greys_of_16_bits_keep_their_shades():
    ramp = Image.fromarray(np.linspace(0, 65535, 5).astype(np.uint16)[None])
    assert np.asarray(open_image(saved(ramp, "PNG")))[0].tolist() == [[v, v, v] for v in (0, 63, 127, 191, 255)]


@pytest.mark.parametrize("mode", ["RGBA", "LA"])
def test_what_is_transparent_is_white(mode):
    image = Image.new("RGBA", (2, 1), (200, 0, 0, 0))
    image.putpixel((1, 0), (90, 90, 90, 255))
    pixels = np.asarray(open_image(saved(image.convert(mode), "PNG")))
    assert pixels[0].tolist() == [[255, 255, 255], [90, 90, 90]]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "no image"),
        (b"hello", "no image"),
        (saved(Image.new("RGB", (4, 4)), "TIFF"), "no image"),
        (saved(Image.new("RGB", (64, 64)), "PNG")[:60], "cannot be decoded"),
        (saved(Image.new("1", (MAX_PIXELS // 8192 + 1, 8192)), "PNG"), "too large"),
    ],
)
def test_what_is_no_image_is_named(eyes, data, message):
    with pytest.raises(ImageError, match=message):
        eyes.features(Picture.of(data))


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize(("width", "height"), [(8193, 8192), (12_000, 10_000), (50_000, 50_000), (2**31 - 1, 1)])
def test_a_small_file_of_many_pixels_is_refused_before_they_are_made(width, height):
    """Red with Pillow's own bounds alone: it warns of the second, and makes the pixels of both that come first."""
    with pytest.raises(ImageError, match=r"too large: at most|DecompressionBombError"):
        open_image(bomb(width, height))


def test_a_jpeg_of_many_scans_is_refused():
    """Each draws all its pixels anew. Red with any number decoded: 95 bytes cost 23 ms at 64 million pixels, a file of
    20 MB more than an hour."""
    few = np.asarray(open_image(with_scans(MAX_SCANS - 9)))
    assert np.array_equal(few, np.asarray(open_image(with_scans(1))))
    with pytest.raises(ImageError, match="more than 64 scans"):
        open_image(with_scans(MAX_SCANS + 1))


def test_scans_behind_a_marker_without_a_length_are_counted():
    """Red when TEM's length is looked for: what comes behind it was skipped, 65,535 bytes at a time."""
    data = with_scans(MAX_SCANS + 1)
    second = data.index(b"\xff\xda", data.index(b"\xff\xda") + 2)
    with pytest.raises(ImageError, match="more than 64 scans"):
        open_image(data[:second] + b"\xff\x01\xff" + data[second:])


def test_what_looks_like_a_scan_in_a_text_of_a_jpeg_is_none():
    """Red when the bytes of a scan are counted wherever they stand."""
    image = Image.new("RGB", (20, 12))
    assert open_image(saved(image, "JPEG", comment=b"\xff\xda" * 500)).size == (20, 12)


@pytest.mark.parametrize("num_frames", [1, 300])
def test_of_a_moving_image_the_first_frame_is_read(num_frames):
    image = open_image(moving(num_frames))
    assert (image.size, image.getpixel((0, 0)), image.getpixel((5, 5))) == ((20, 12), (10, 200, 10), (200, 10, 10))
    with pytest.raises(ImageError):
        open_image(moving(num_frames)[:40])


def test_a_drawing_is_no_image():
    """Its entities are never looked at."""
    with pytest.raises(ImageError, match="no image"):
        open_image(ENTITIES)


def test_a_model_without_a_tower_has_no_eyes(toy_model_dir):
    assert eyes_of(toy_model_dir, AutoConfig.from_pretrained(toy_model_dir)) is None


def test_a_checkpoint_without_its_processor_names_the_file(folder, tmp_path):
    with pytest.raises(ModelError, match=r"preprocessor_config\.json"):
        eyes_of(tmp_path, AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("kind", SEEING)
def test_every_type_writes_an_image_as_its_tower_reads_it(toy_model_dir, tmp_path, kind):
    """One image token for each row of the tower's output."""
    folder = make_seeing_checkpoint(kind, tmp_path, toy_model_dir)
    module = AutoModelForImageTextToText.from_pretrained(folder)
    sight = Sight(module)
    pictures = [draw(1, 40, 16), draw(2, 16, 24)]
    ids, spans = sight.eyes.expand(f"a {written(sight.eyes)} b {written(sight.eyes)} c", pictures)
    for span, picture in zip(spans, pictures, strict=True):
        at = ids[span.start : span.stop] == sight.eyes.image_token_id
        assert at[[0, -1]].all()
        assert at.all() or kind == "mistral3"  # which has tokens at the ends of rows
        rows = sight.see(picture).rows_IC
        assert len(rows) == at.sum() == sight.num_tokens(picture)
        assert rows.std() > 1e-3
