from stretto.topology import keyed_random as keyed

WORDS = [7627536391536171166, 18281217722361359683, 10889478411493501261]


def test_words_never_change():
    # A run resumed under another version must have the same peers.
    drawn = keyed.random_words(3, seed=1, step=2, segment=3)
    assert drawn == WORDS


def test_fewer_words_are_a_prefix_of_more():
    assert keyed.random_words(5, seed=1, step=2, segment=3)[:3] == WORDS


def test_any_integer_is_a_seed():
    drawn = {
        tuple(keyed.random_words(2, seed=seed, step=0, segment=0)) for seed in (-1, 0, 1, 1 << 63)
    }
    assert len(drawn) == 4


def test_words_become_indices_below_a_bound():
    top = (1 << 64) - 1
    assert [keyed.word_to_index(6, word) for word in (0, top // 2, top)] == [0, 2, 5]
    assert keyed.word_to_index(1, top) == 0


def test_a_permutation_may_have_fixed_points_and_a_cycle_has_none():
    stayed = [sum(p[i] == i for i in range(4)) for p in drawn_by(keyed.random_permutation)]
    assert 0.7 < sum(stayed) / len(stayed) < 1.3  # one in expectation
    assert not any(p[i] == i for p in drawn_by(keyed.random_cycle) for i in range(4))


def drawn_by(make):
    return [make(4, 0, step, 0) for step in range(300)]


def test_zero_and_one_element_can_be_shuffled():
    assert keyed.random_permutation(0, 0, 0, 0) == ()
    assert keyed.random_permutation(1, 0, 0, 0) == keyed.random_cycle(1, 0, 0, 0) == (0,)


def test_draws_share_no_words():
    keys = [(seed, step, segment) for seed in (0, 1) for step in range(6) for segment in range(3)]
    drawn = [w for s, t, g in keys for w in keyed.random_words(64, seed=s, step=t, segment=g)]
    assert len(set(drawn)) == len(keys) * 64
