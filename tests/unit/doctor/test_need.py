import pytest

from stretto.data import ImagesConfig
from stretto.doctor.gather_facts import requirements_of
from stretto.run import RunConfig


@pytest.mark.parametrize(("asked", "counted"), [(None, 16), (3, 6)])
def test_the_decoders_of_training_and_of_evaluation_are_counted(asked, counted):
    config = RunConfig(data=ImagesConfig(path="x", decoders=asked))
    assert requirements_of(config, model_is_known=False).decoders == counted


def test_a_run_without_images_has_no_decoders():
    assert requirements_of(RunConfig(), model_is_known=False).decoders == 0
