"""Ages in words a person uses."""

import pytest

from tribe.health.ages import Age, as_age, parse_age, show_seconds

WORDS = {
    "2h": 7200,
    "90 min": 5400,
    "30s": 30,
    "1 day": 86_400,
    " 2 Hours ": 7200,
    "1h 30min": 5400,
    "1h30m": 5400,
    "0.5 h": 1800,
    ".5h": 1800,
    "1 week": 604_800,
    "10_000 seconds": 10_000,
}


@pytest.mark.parametrize("text", WORDS)
def test_times_are_understood(text):
    assert parse_age(text) == Age(seconds=WORDS[text])


@pytest.mark.parametrize("text", ["500 images", "500images", "1 image", "1_000 Images"])
def test_counts_of_images_are_understood(text):
    assert parse_age(text).seconds is None
    assert parse_age(text).images == int(text.lower().replace("_", "").removesuffix("s").removesuffix("image"))


@pytest.mark.parametrize("text", ["", "h", "2", "yesterday", "-2h", "2h ago", "2 fortnights", "1,5 h", "h 2", "2 h h"])
def test_other_texts_are_refused_and_told_what_is_understood(text):
    with pytest.raises(ValueError, match=r'"2h".*"500 images"'):
        parse_age(text)


@pytest.mark.parametrize("text", ["1.5 images", "1h 500 images", "3 images 4 images"])
def test_images_are_whole_and_alone(text):
    with pytest.raises(ValueError, match="one whole number"):
        parse_age(text)


def test_exactly_one_age_is_given():
    assert as_age("2h") == as_age(seconds=7200) == Age(seconds=7200)
    assert as_age(images=3) == Age(images=3)
    with pytest.raises(TypeError, match="nothing was given"):
        as_age()
    with pytest.raises(TypeError, match="2 of them"):
        as_age("2h", images=3)
    with pytest.raises(TypeError, match="or a snapshot; got int"):
        as_age(500)
    for wrong in ({"images": -1}, {"images": 1.5}, {"images": True}, {"seconds": -1}, {"seconds": float("nan")}):
        with pytest.raises(ValueError, match="at least 0"):
            as_age(**wrong)


def test_ages_are_shown_in_a_unit_that_suits_them():
    assert [show_seconds(s) for s in (0, 59, 90, 7200, 200_000)] == ["0 s", "59 s", "1.5 min", "2 h", "2.31 d"]
    assert str(Age(images=1500)) == "1,500 images"
