"""Labels in files: by number or name, and what is wrong with a line in words."""

import pytest

from trials import recorded, table
from tribe.trial.labels import read_labels, write_labels
from tribe.trial.trial import NEITHER

NAMES = ("cat", "dog", "1", "bird")


@pytest.fixture
def trial(tmp_path):
    return table([0, 0, 1, 2, 3, 3], [0, 1, 1, 3, 3, 0], names=NAMES)


@pytest.fixture
def recording(tmp_path):
    found = recorded(tmp_path, 6)
    found.name = lambda i: ("a.png", "b.png", "12", "same.png", "same.png", "f.png")[i]
    return found


def read(tmp_path, text, trial, recording):
    (tmp_path / "labels.csv").write_text(text)
    return read_labels(tmp_path / "labels.csv", trial, recording)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("0,cat\n5,bird\n", {0: 0, 5: 3}),
        ("frame,label\n1,dog\n3,?\n4,\n", {1: 1, 3: NEITHER}),
        ("label,weather,file\ndog,fog,b.png\n3,sun,a.png\n", {1: 1, 0: 3}),
        ("frame,file,label\n4,,cat\n,f.png,dog\n", {4: 0, 5: 1}),
        ("\ufefffile,class\n12,1\n2,1\n", {2: 2}),  # a file and a class whose names are numbers
        ("0,dog\n0,dog\n", {0: 1}),
        ("", {}),
    ],
)
def test_frames_and_classes_have_names_and_numbers(tmp_path, trial, recording, text, expected):
    assert read(tmp_path, text, trial, recording) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0,cat\n5,bird\n0,dog\n", ("contradicts", "frame 0", "cat", "dog", "line 1", "line 3")),
        ("b.png,cat\n1,dog\n", ("contradicts", "cat in line 1")),
        ("0,4\n", ("line 1", "no class 4")),
        ("6,cat\n", ("no frame 6", "0 to 5")),
        ("0,brid\n", ("line 1", "brid", "bird")),
        ("c.png,cat\n", ("c.png", "a.png")),
        ("same.png,cat\n", ("several", "number")),
        ("label\ncat\n", ("which frame",)),
        ("frame,label\n,cat\n", ("line 2", "no frame")),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path, trial, recording, text, words):
    with pytest.raises(ValueError, match=words[0]) as caught:
        read(tmp_path, text, trial, recording)
    for each in words:
        assert each in str(caught.value)


def test_labels_that_were_written_are_read_and_the_rest_is_in_the_order_of_the_draw(tmp_path, trial, recording):
    labels = {1: 1, 3: NEITHER}
    path = tmp_path / "labels.csv"
    write_labels(path, labels, trial, recording)
    assert read_labels(path, trial, recording) == labels
    lines = path.read_text().splitlines()
    assert lines[:3] == ["frame,file,label", "1,b.png,dog", "3,same.png,?"]
    assert [int(line.split(",")[0]) for line in lines[3:]] == [f for f in trial.draw.tolist() if f not in labels]


def test_a_file_that_is_no_text_is_refused(tmp_path, trial, recording):
    (tmp_path / "labels.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="UTF-8"):
        read_labels(tmp_path / "labels.csv", trial, recording)
