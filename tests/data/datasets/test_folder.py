"""Pictures from files: decoded as the field decodes them, in folders of one's own and in ImageNet-C's, good and bad."""

import shutil
import subprocess
import sys
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import layouts
from layouts import WNIDS, made, picture, pixels
from processes import ended
from tribe import datasets, methods, metrics, scenarios
from tribe.core.backbone import Backbone
from tribe.data.datasets.files import MissingData
from tribe.data.images import ImageFileError, read_image
from tribe.experiments.runner import run
from tribe.experiments.stream import Stream
from tribe.testing import CLASSES, check_dataset, informed, small_network

draw = np.random.default_rng(0)


@pytest.fixture
def camera(tmp_path):
    layouts.write_folder(tmp_path / "camera", draw)
    return tmp_path / "camera"


@pytest.fixture
def unlabelled(tmp_path):
    for domain in ("monday", "tuesday"):
        (tmp_path / "road" / domain).mkdir(parents=True)
        for i in range(5):
            picture(draw, 8, 8).save(tmp_path / "road" / domain / f"{i}.png")
    return tmp_path / "road"


@pytest.fixture
def imagenet(tmp_path):
    layouts.write_imagenet_c(tmp_path / "ImageNet-C", draw)
    return tmp_path


def folder(root, **fields):
    return datasets.create("folder", root=str(root), **fields)


def cut(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


# -- one picture ---------------------------------------------------------------------------------------------------


def test_a_picture_is_its_bytes(tmp_path):
    array = pixels(draw, 5, 7, 3)
    for suffix in ("png", "bmp", "ppm", "tif"):
        Image.fromarray(array).save(tmp_path / f"a.{suffix}")
        read = read_image(tmp_path / f"a.{suffix}")
        assert read.dtype == torch.uint8
        assert torch.equal(read, torch.from_numpy(array).permute(2, 0, 1)), suffix


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGBA", "CMYK"])
def test_other_colours_become_rgb(mode, tmp_path):
    source = picture(draw, 6, 9).convert(mode)
    source.save(tmp_path / "a.tif")
    expected = np.array(source.convert("RGB")).transpose(2, 0, 1)
    assert np.array_equal(read_image(tmp_path / "a.tif").numpy(), expected)


@pytest.mark.parametrize(("height", "width"), [(60, 90), (91, 60), (60, 60), (20, 31)])
def test_resize_is_bilinear_with_antialiasing_on_the_shorter_side(height, width, tmp_path):
    picture(draw, height, width).save(tmp_path / "a.png")
    whole = read_image(tmp_path / "a.png")
    resized = read_image(tmp_path / "a.png", resize=32)
    size = (32, int(32 * width / height)) if height <= width else (int(32 * height / width), 32)
    assert resized.shape == (3, *size)
    expected = F.interpolate(whole[None].float(), size, mode="bilinear", antialias=True)[0]
    assert (resized.float() - expected).abs().max() <= 1, "a grey level of rounding"


def test_the_crop_is_torchvisions(tmp_path):
    """Offsets by torchvision's rule: round half to even where it cuts, round down where it pads with black."""
    for height, width, side, top, left in ((9, 12, 6, 2, 3), (7, 11, 4, 2, 4), (11, 6, 6, 2, 0)):
        picture(draw, height, width).save(tmp_path / "a.png")
        whole = read_image(tmp_path / "a.png")
        assert torch.equal(read_image(tmp_path / "a.png", crop=side), whole[:, top : top + side, left : left + side])
    picture(draw, 3, 9).save(tmp_path / "a.png")
    whole, padded = read_image(tmp_path / "a.png"), read_image(tmp_path / "a.png", crop=6)
    assert torch.equal(padded[:, 1:4], whole[:, :, 2:8])
    assert int(padded[:, 0].max()) == int(padded[:, 4:].max()) == 0


def test_an_exif_orientation_is_not_applied(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees
    picture(draw, 6, 9).save(tmp_path / "a.jpg", exif=exif)
    assert read_image(tmp_path / "a.jpg").shape == (3, 6, 9)


def test_without_pillow_the_error_says_what_to_install():
    program = (
        "import sys; sys.modules['PIL'] = None\n"
        "import tribe.data.datasets\n"  # data sets of arrays need no Pillow
        "from tribe.data.images import read_image\n"
        "try: read_image('a.png')\n"
        "except ImportError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "pip install 'tribe-tta[images]'" in said


# -- folders -------------------------------------------------------------------------------------------------------


def test_domains_classes_and_order_are_those_of_the_names(camera):
    data = folder(camera)
    assert (data.domains, data.classes) == (("day", "night"), ("cat", "dog"))
    assert data.labels("day").tolist() == [0] * 4 + [1] * 4
    expected = read_image(camera / "night/dog/2.png").float() / 255
    assert torch.equal(data.images("night", torch.tensor([6]))[0], expected)


def test_classes_may_be_given(camera):
    data = folder(camera, class_names=("dog", "bird", "cat"))
    assert data.labels("day").tolist() == [2] * 4 + [0] * 4
    with pytest.raises(ValueError, match=r"class folder 'dog' that class_names lacks: .*Known: cat, dgo"):
        folder(camera, class_names=("cat", "dgo")).labels("day")


def test_a_class_that_a_domain_lacks_keeps_the_numbers(camera):
    shutil.rmtree(camera / "night/cat")
    assert folder(camera).labels("night").tolist() == [1] * 4


def test_size_resizes_and_crops(camera):
    picture(draw, 30, 50).save(camera / "day/cat/0.png")
    data = folder(camera, size=16)
    check_dataset(data)
    expected = read_image(camera / "day/cat/0.png", resize=16, crop=16).float() / 255
    assert torch.equal(data.images("day", torch.tensor([0]))[0], expected)
    with pytest.raises(ValueError, match=r"(0|1).png is (50x30|24x24) pixels; expected .*size= would"):
        folder(camera).images("day", torch.tensor([0, 1]))


def test_hidden_files_are_left_out_and_others_with_a_warning(camera):
    before = folder(camera).labels("day")
    (camera / ".cache").mkdir()
    (camera / "day/cat/._0.png").write_bytes(b"resource fork")
    (camera / "day/.DS_Store").write_bytes(b"")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert torch.equal(folder(camera).labels("day"), before)
    (camera / "day/cat/notes.txt").write_text("")
    (camera / "readme.md").write_text("")
    with pytest.warns(UserWarning, match=r"ignored, no image by its name: .*readme.md and 1 more"):
        assert torch.equal(folder(camera).labels("day"), before)


LAYOUTS = {
    "no root": (shutil.rmtree, "no folder"),
    "nothing": (lambda r: [shutil.rmtree(p) for p in r.iterdir()], "holds no folders"),
    "pictures in the root": (lambda r: picture(draw, 4, 4).save(r / "a.png"), "itself holds images, such as a.png"),
    "pictures beside classes": (lambda r: picture(draw, 4, 4).save(r / "day/a.png"), "a.png, beside class folders"),
    "an empty domain": (lambda r: (r / "dusk").mkdir(), "dusk holds no images; remove it"),
    "empty classes": (lambda r: (r / "dusk/cat").mkdir(parents=True), "dusk holds no images"),
    "too deep": (lambda r: (r / "day/cat/more").mkdir(), "cat is a class folder, but holds a folder, more"),
}


@pytest.mark.parametrize("case", LAYOUTS)
def test_layouts_that_make_no_sense_are_refused(case, camera):
    damage, words = LAYOUTS[case]
    damage(camera)
    with pytest.raises((ValueError, MissingData), match=words + r".*expected root/<domain>/<class>"):
        _ = folder(camera).domains


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"size": 0}, "size of folder"),
        ({"unreadable": "ignore"}, "unreadable of folder"),
        ({"workers": 0}, "workers of folder"),
        *(
            ({"class_names": names}, "class_names are different")
            for names in ((9, 8), 9, "cat", ("cat", 1), ("a", "a"))
        ),
    ],
)
def test_bad_fields(camera, fields, words):
    with pytest.raises(ValueError, match=words):
        folder(camera, **fields)


# -- without labels ------------------------------------------------------------------------------------------------


def test_unlabelled_pictures_replay_in_file_order(unlabelled):
    data = folder(unlabelled)
    check_dataset(data)
    assert data.classes == ()
    stream = Stream(data, scenarios.create("replay"), (0,), batch=4)
    schedule = stream.schedules[0]
    assert schedule.domain.tolist() == [0] * 5 + [1] * 5
    assert schedule.index.tolist() == [*range(5), *range(5)]
    (record,) = run(Backbone(small_network()), methods.create("tent", classes=CLASSES), stream)
    assert record.label.tolist() == [-1] * 10
    assert record.domain.tolist() == [0] * 5 + [1] * 5
    with pytest.raises(ValueError, match="no labels"):
        metrics.instance_error(record)


def test_other_scenarios_refuse_them_and_name_replay(unlabelled):
    for name in set(scenarios.names()) - {"replay", "gradual", "zigzag"}:
        with pytest.raises(ValueError, match=r"'monday' hold -1.*scenario 'replay'"):
            Stream(folder(unlabelled), scenarios.create(name))


def test_labelled_and_unlabelled_domains_go_together(camera, unlabelled):
    shutil.copytree(camera / "day", unlabelled / "day")
    data = folder(unlabelled, size=8)
    check_dataset(data)
    labels = [data.labels(domain) for domain in data.domains]
    assert [y.tolist() for y in labels] == [[0] * 4 + [1] * 4, [-1] * 5, [-1] * 5]
    schedule = Stream(data, scenarios.create("replay")).schedules[0]
    assert scenarios.class_counts(schedule, labels).tolist() == [[4, 4], [0, 0], [0, 0]]
    balance = scenarios.local_balance(schedule, labels, window=9)
    assert balance[0] == pytest.approx(1.0)
    assert balance[1].isnan()


def test_replay_may_visit_domains_in_another_order():
    labels = [torch.full((3,), -1)] * 4
    orders = {
        tuple(scenarios.create("replay", order="random").schedule(labels, seed).domain.tolist()) for seed in range(5)
    }
    assert len(orders) > 1
    with pytest.raises(ValueError, match="hold -2; expected classes from 0"):
        scenarios.create("replay").schedule([torch.tensor([-2])], 0)


# -- pictures that cannot be read ----------------------------------------------------------------------------------


def test_a_skipped_picture_is_named_in_a_warning_and_recorded_nowhere(camera):
    cut(camera / "day/cat/0.png")  # the first: the size comes from another
    cut(camera / "night/dog/2.png")
    data = folder(camera, unreadable="skip")
    stream = Stream(data, scenarios.create("replay"), batch=3)
    with pytest.warns(UserWarning, match="skipped: .*cannot be read") as warned:
        batches = [*stream, *stream][: len(stream)]
    assert {str(w.message).split(" cannot")[0].rpartition("/")[2] for w in warned} == {"0.png", "2.png"}
    valid = torch.cat([b.valid[0] for b in batches])
    assert (~valid).nonzero().flatten().tolist() == [0, 14]
    for batch in batches:
        assert batch.x.isfinite().all()
        assert (batch.x[~batch.valid] == 0).all()
        assert (batch.y[~batch.valid] == -1).all()
    with pytest.warns(UserWarning, match="skipped"):
        check_dataset(data)
    with pytest.warns(UserWarning, match="skipped"):
        assert data.images("day", torch.tensor([0])).isnan().all()


@pytest.mark.parametrize("method", methods.names())
def test_a_batch_of_nothing_but_unreadable_pictures_changes_nothing(method, unlabelled):
    for i in range(3):  # a whole batch, then one of each
        cut(unlabelled / f"monday/{i}.png")
    cut(unlabelled / "tuesday/4.png")
    data = folder(unlabelled, unreadable="skip")
    with pytest.warns(UserWarning, match="skipped"):
        (record,) = run(
            Backbone(small_network()),
            informed(methods.create(method, classes=CLASSES)),
            Stream(data, scenarios.create("replay"), batch=3),
        )
    assert record.domain.tolist() == [0] * 2 + [1] * 4
    assert record.confidence.isfinite().all()
    shutil.rmtree(unlabelled / "monday")
    for path in (unlabelled / "tuesday").iterdir():
        path.write_bytes(b"")
    with pytest.raises(ImageFileError, match="none of the images in"):
        folder(unlabelled, unreadable="skip").images("tuesday", torch.tensor([0]))


# -- ImageNet-C ----------------------------------------------------------------------------------------------------


def names_of(data, domain):
    return list(data.listing(domain).names)


def test_imagenet_c_in_both_layouts_sorted_by_class_and_name(imagenet):
    data = made("imagenet-c", imagenet)
    assert data.classes == WNIDS
    for domain in ("fog@5", "shot_noise@5"):
        assert data.labels(domain).tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
        assert names_of(data, domain) == sorted(names_of(data, domain))
    path = imagenet / "ImageNet-C/noise/shot_noise/5" / WNIDS[1] / "ILSVRC2012_val_00000107.JPEG"
    assert torch.equal(data.images("shot_noise@5", torch.tensor([4]))[0], read_image(path).float() / 255)
    assert data.listing("fog@5").names is data.listing("shot_noise@5").names, "the names are held once"


def test_ids_select_and_order_and_classes_keep_their_numbers(imagenet):
    chosen = [f"{WNIDS[2]}/ILSVRC2012_val_00000214.JPEG", f"{WNIDS[1]}/ILSVRC2012_val_00000007.JPEG"]
    ids = imagenet / "ids.txt"
    ids.write_text("\n".join(chosen) + "\n\n")
    data = made("imagenet-c", imagenet, ids=str(ids))
    check_dataset(data)
    assert data.classes == WNIDS
    assert data.labels("fog@5").tolist() == [2, 1]
    assert names_of(data, "fog@5") == chosen
    everything = made("imagenet-c", imagenet)
    where = names_of(everything, "fog@5").index(chosen[0])
    assert torch.equal(data.images("fog@5", torch.tensor([0])), everything.images("fog@5", torch.tensor([where])))


FIRST = f"{WNIDS[0]}/ILSVRC2012_val_00000000.JPEG"
IDS = {  # the content of the list, and a word of the message
    "a missing image": (f"{FIRST}\nn01440764/none.JPEG", "none.JPEG', listed in .* is not an image in .*fog/5"),
    "an image twice": (f"{FIRST}\n{FIRST}", "one of them twice"),
    "nothing": ("", "lists no images"),
    "no text": (b"\xff\xfe\x00", "is not an image in"),
}


@pytest.mark.parametrize("case", IDS)
def test_bad_ids(imagenet, case):
    content, words = IDS[case]
    (imagenet / "ids.txt").write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ValueError, match=words):
        made("imagenet-c", imagenet, ids=str(imagenet / "ids.txt")).labels("fog@5")


FOG, SHOT = "ImageNet-C/fog/5", "ImageNet-C/noise/shot_noise/5"
BAD = {
    "no severity": (lambda r: (r / FOG).rename(r / "gone"), MissingData, "fog@5 not found: .*fog/5 or .*weather/fog/5"),
    "no corruption": (lambda r: shutil.rmtree(r / "ImageNet-C/fog"), MissingData, r"files/weather\.tar"),
    "another size": (lambda r: picture(draw, 200, 224).save(r / FOG / FIRST), ValueError, "224x200 .*expected 224"),
    "cut short": (lambda r: cut(r / FOG / FIRST), ImageFileError, "00000000.JPEG cannot be read as an image"),
    "a class too few": (lambda r: shutil.rmtree(r / SHOT / WNIDS[1]), ValueError, f"'{WNIDS[1]}' is in only one"),
    "no pictures": (lambda r: [path.unlink() for path in (r / FOG).rglob("*.JPEG")], MissingData, "holds no images"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_imagenet_c(imagenet, case):
    damage, error, words = BAD[case]
    damage(imagenet)
    data = made("imagenet-c", imagenet)
    with pytest.raises(error, match=words):
        _ = [data.images(domain, torch.arange(9)) for domain in data.domains]


def test_bad_requests_of_imagenet_c(imagenet):
    with pytest.raises(ValueError, match="a severity is 1, 2, 3, 4 or 5; got 0"):
        made("imagenet-c", imagenet, severities=(0,))
    with pytest.raises(FileNotFoundError, match=r"nowhere\.txt"):
        made("imagenet-c", imagenet, ids="nowhere.txt").labels("fog@5")
    with pytest.raises(MissingData, match="own_blur@5 not found"):
        made("imagenet-c", imagenet, corruptions=("own_blur",)).labels("own_blur@5")


# -- reading ahead -------------------------------------------------------------------------------------------------


class Hanging:
    """Images whose second batch takes its time."""

    classes, domains = tuple("abcd"), ("here",)

    def __init__(self):
        self.reads, self.gave_up = 0, False
        self.hangs, self.goes_on = threading.Event(), threading.Event()

    def labels(self, domain):
        return torch.arange(40) % 4

    def images(self, domain, index):
        self.reads += 1
        if self.reads == 2:
            self.hangs.set()
            self.gave_up = not self.goes_on.wait(30)
        return torch.rand(len(index), 3, 8, 8)


def test_whoever_stops_early_does_not_wait_for_the_reader():
    data = Hanging()
    batches = iter(Stream(data, scenarios.create("replay"), batch=4))
    next(batches)
    assert data.hangs.wait(30)
    batches.close()
    begun = [thread for thread in threading.enumerate() if thread.name.startswith("tribe-reader")]
    data.goes_on.set()
    for thread in begun:
        thread.join(30)
    assert not data.gave_up, "closing came back while the read still hung"
    assert begun
    assert not any(thread.is_alive() for thread in begun)
    assert data.reads == 2, "what was not begun is not read"


PROGRAM = """
import threading, time, torch
from tribe import scenarios
from tribe.experiments.stream import Stream

class Sorted:
    classes, domains = tuple("abcd"), ("here",)
    def labels(self, domain):
        return torch.arange(40) % 4
    def images(self, domain, index):
        for _ in range(20):
            x = torch.rand(len(index), 3, 64, 64).sort().values
        return x

def played():
    while threading.main_thread().is_alive():
        time.sleep(0.01)
    print(sum(1 for _ in batches))

batches = iter(Stream(Sorted(), scenarios.create("replay"), batch=4))
"""


@pytest.mark.parametrize(
    ("ending", "printed"), [("threading.Thread(target=played).start()", "10\n"), ("next(batches)", "")]
)
def test_a_program_may_end_while_a_stream_is_read(ending, printed):
    """A thread that plays on gets all batches; one that was left in the middle of torch does not abort the process."""
    assert ended("-c", PROGRAM + ending) == (0, printed, "")


@pytest.mark.gpu
def test_batches_are_pinned_for_the_gpu(unlabelled):
    stream = Stream(folder(unlabelled), scenarios.create("replay"), batch=4)
    for pinned, plain in zip(stream.starting_at(0, pin=True), stream, strict=True):
        assert pinned.x.is_pinned()
        assert not plain.x.is_pinned()
        assert torch.equal(pinned.x, plain.x)
    method = methods.create("tribe", classes=CLASSES)
    (there,) = run(Backbone(small_network()).to("cuda"), method, stream)
    (here,) = run(Backbone(small_network()), method, stream)
    assert torch.allclose(there.confidence, here.confidence, atol=1e-3)
