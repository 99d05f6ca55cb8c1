import pytest
from pydantic import ValidationError

from stretto.config import load, to_toml
from stretto.data import ImagesConfig
from stretto.data.images.config import Form


@pytest.mark.parametrize(
    ("settings", "side"),
    [
        ({"augment": "crop"}, 256),
        ({"augment": "crop", "size": 32}, 37),
        ({"augment": "pad_crop"}, 224),
        ({"augment": "flip"}, 224),
        ({"augment": "none"}, 224),
        ({"augment": "none", "store": 300}, 300),
    ],
)
def test_the_stored_size_follows_from_the_augmentation_unless_set(settings, side):
    config = ImagesConfig(path="x", **settings)
    assert config.form(train=True) == config.form(train=False) == Form(side)


@pytest.mark.parametrize(("store", "side"), [({}, 384), ({"store": 300}, 300)])
def test_area_crops_store_whole_images_and_evaluation_the_usual_squares(store, side):
    config = ImagesConfig(path="x", augment="area_crop", **store)
    assert config.form(train=True) == Form(side, is_whole=True)
    assert config.form(train=False) == Form(256)


AREA_KEYS = {"area": (0.1, 0.5), "aspect": (1.0, 2.0), "plain_from_epoch": 3}


@pytest.mark.parametrize("key", AREA_KEYS)
def test_a_key_of_area_crops_is_refused_with_another_augmentation(key):
    ImagesConfig(path="x", augment="area_crop", **{key: AREA_KEYS[key]})
    with pytest.raises(ValidationError, match=f'{key} set for augment = .crop.*"area_crop"'):
        ImagesConfig(path="x", **{key: AREA_KEYS[key]})


@pytest.mark.parametrize("augment", ["crop", "area_crop"])
def test_a_run_file_that_names_every_key_is_read_back(tmp_path, augment):
    loaded = load(ImagesConfig, None, ["path=x", f"augment={augment}"])
    (tmp_path / "resolved.toml").write_text(to_toml(loaded))
    assert load(ImagesConfig, tmp_path / "resolved.toml").config == loaded.config


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"store": 100}, "store = 100 is less than size = 224"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"augment": "rotate"}, "augment"),
        ({"augment": "area_crop", "area": (0.5, 0.1)}, r"area = \[0.5, 0.1\]: expected the least"),
        ({"augment": "area_crop", "area": (0.0, 1.0)}, "above 0 and at most 1"),
        ({"augment": "area_crop", "area": (0.5, 1.5)}, "above 0 and at most 1"),
        ({"augment": "area_crop", "aspect": (2.0, 1.0)}, r"aspect = \[2.0, 1.0\]: expected"),
        ({"augment": "area_crop", "aspect": (0.0, 1.0)}, "aspect"),
        ({"augment": "area_crop", "plain_from_epoch": -1}, "plain_from_epoch"),
        ({"decoders": 0}, "decoders"),
        ({"max_corrupt_files": 1.5}, "max_corrupt_files"),
        ({"cache_size": "many"}, "cache_size"),
    ],
)
def test_impossible_settings_are_refused(wrong, named):
    with pytest.raises(ValidationError, match=named):
        ImagesConfig(path="x", **wrong)


def test_the_cache_size_may_have_a_unit():
    assert ImagesConfig(path="x", cache_size="3MB").cache_size == 3_000_000


@pytest.mark.parametrize(
    ("asked", "cores", "expected"), [(None, 0, 1), (None, 6, 6), (None, 64, 8), (12, 2, 12)]
)
def test_the_number_of_decoders_follows_from_the_cores_unless_set(asked, cores, expected):
    assert ImagesConfig(path="x", decoders=asked).decoders_for_cores(cores) == expected


@pytest.mark.parametrize(("asked", "most"), [(None, 16), (3, 6)])
def test_a_rank_has_decoders_for_training_and_for_evaluation(asked, most):
    assert ImagesConfig(path="x", decoders=asked).max_decoders == most
