import pytest
from pydantic import ValidationError

from stretto.data import ImagesConfig


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
def test_what_is_kept_follows_from_the_augmentation_unless_it_is_set(settings, side):
    assert ImagesConfig(path="x", **settings).side == side


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"store": 100}, "store = 100 is less than size = 224"),
        ({"std": (1.0, 0.0, 1.0)}, "std"),
        ({"augment": "rotate"}, "augment"),
        ({"decoders": 0}, "decoders"),
        ({"bad_limit": 1.5}, "bad_limit"),
        ({"cache_size": "many"}, "cache_size"),
    ],
)
def test_impossible_settings_are_refused(wrong, named):
    with pytest.raises(ValidationError, match=named):
        ImagesConfig(path="x", **wrong)


def test_a_size_of_the_cache_is_written_as_people_write_it():
    assert ImagesConfig(path="x", cache_size="3MB").cache_size == 3_000_000


@pytest.mark.parametrize(
    ("asked", "cores", "expected"), [(None, 0, 1), (None, 6, 6), (None, 64, 8), (12, 2, 12)]
)
def test_decoders_follow_from_the_cores_unless_they_are_set(asked, cores, expected):
    assert ImagesConfig(path="x", decoders=asked).decoders_on(cores) == expected


@pytest.mark.parametrize(("asked", "most"), [(None, 16), (3, 6)])
def test_a_rank_has_decoders_for_training_and_for_evaluation(asked, most):
    assert ImagesConfig(path="x", decoders=asked).most_decoders == most
