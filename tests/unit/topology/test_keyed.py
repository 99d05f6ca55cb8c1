from stretto.topology import keyed

WORDS = [7627536391536171166, 18281217722361359683, 10889478411493501261]


def test_words_are_the_same_for_ever():
    # Runs that go on under another version must find their peers again.
    drawn = keyed.words(3, seed=1, step=2, segment=3)
    assert drawn == WORDS


def test_fewer_words_are_the_first_of_more():
    assert keyed.words(5, seed=1, step=2, segment=3)[:3] == WORDS


def test_any_integer_is_a_seed():
    drawn = {tuple(keyed.words(2, seed=seed, step=0, segment=0)) for seed in (-1, 0, 1, 1 << 63)}
    assert len(drawn) == 4


def test_words_become_numbers_below_a_bound():
    top = (1 << 64) - 1
    assert [keyed.below(6, word) for word in (0, top // 2, top)] == [0, 2, 5]
    assert keyed.below(1, top) == 0


def test_a_permutation_may_leave_things_where_they_are_and_a_cycle_may_not():
    stayed = [sum(p[i] == i for i in range(4)) for p in drawn_by(keyed.permutation)]
    assert 0.7 < sum(stayed) / len(stayed) < 1.3  # one in expectation
    assert not any(p[i] == i for p in drawn_by(keyed.cycle) for i in range(4))


def drawn_by(make):
    return [make(4, 0, step, 0) for step in range(300)]


def test_nothing_and_one_thing_can_be_shuffled():
    assert keyed.permutation(0, 0, 0, 0) == ()
    assert keyed.permutation(1, 0, 0, 0) == keyed.cycle(1, 0, 0, 0) == (0,)


def test_draws_share_no_words():
    keys = [(seed, step, segment) for seed in (0, 1) for step in range(6) for segment in range(3)]
    drawn = [w for s, t, g in keys for w in keyed.words(64, seed=s, step=t, segment=g)]
    assert len(set(drawn)) == len(keys) * 64
