"""Images in folders of classes, read with Pillow, in an order that follows from the seed alone. For train.py."""

import math
import random
from concurrent.futures import ThreadPoolExecutor

import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

SUFFIXES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}


class UnreadableImage(Exception):
    """An image whose header is well and whose content is not."""


class Images(Dataset):
    """The images of `folder`, a class for each folder in it. A key is (epoch or None, index).

    How an image is augmented follows from seed, epoch and index alone, whichever process reads it.
    """

    def __init__(self, folder, args, augmentation="none"):
        self.size, self.mode, self.seed = args.image_size, "RGB" if args.color else "L", args.seed
        self.augmentation = augmentation
        if not folder.is_dir():
            raise SystemExit(
                f"{folder} is no folder: --train-data has train/<class>/* and validation/<class>/*"
            )
        classes = sorted(path for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        if not classes:
            raise SystemExit(f"{folder} has no folder: each class is one, with its images in it")
        self.classes = [path.name for path in classes]
        self.paths, self.labels = [], []
        for label, path in enumerate(classes):
            found = sorted(p for p in path.iterdir() if p.suffix.lower() in SUFFIXES and p.name[0] != ".")
            if not found:
                raise SystemExit(f"{path} has no image ({' '.join(sorted(SUFFIXES))})")
            self.paths += found
            self.labels += [label] * len(found)

    def __len__(self):
        return len(self.paths)

    def __getitem__(self, key):
        epoch, index = key
        try:
            with Image.open(self.paths[index]) as file:
                image = file.convert(self.mode)
        except Exception as error:
            raise UnreadableImage(f"1 image cannot be read: {self.paths[index]}: {error}") from None
        box, chance = (0, 0, *image.size), random.Random(f"{self.seed} {epoch} {index}")
        if self.augmentation != "none":  # a part of the image, at least two thirds of its area
            share = math.sqrt(chance.uniform(0.66, 1))
            width, height = share * image.width, share * image.height
            x, y = chance.uniform(0, image.width - width), chance.uniform(0, image.height - height)
            box = (x, y, x + width, y + height)
        image = image.resize((self.size, self.size), Image.Resampling.BILINEAR, box)
        if self.augmentation == "crop-and-flip" and chance.random() < 0.5:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
        return pixels.view(self.size, self.size, -1).permute(2, 0, 1), self.labels[index]


def read_folders(args):
    """The images to train on and those to validate on. Ends in one line where something is wrong."""
    train = Images(args.train_data / "train", args, args.augmentation)
    validation = Images(args.train_data / "validation", args)
    differ = sorted({*train.classes} ^ {*validation.classes})
    if differ:
        places = (f"{name} in {'train' if name in train.classes else 'validation'} alone" for name in differ)
        raise SystemExit(f"the classes of train and validation differ: {', '.join(places)}")
    return train, validation


def unreadable(paths):
    """`path: reason` of each image that has no readable header."""

    def fault(path):
        try:
            with Image.open(path):
                return None
        except Exception as error:
            return f"{path}: {error}"

    with ThreadPoolExecutor(16) as pool:
        return [found for found in pool.map(fault, paths) if found]


def epoch_keys(count, epoch, first_step, rank, ranks, args):
    """One rank's batches of an epoch, as keys, from `first_step` on. A last step that is not whole is left out."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(args.seed * 100_003 + epoch))
    size = args.batch_size
    steps = range(first_step, count // (size * ranks))
    starts = ((step * ranks + rank) * size for step in steps)
    return [[(epoch, index) for index in order[start : start + size].tolist()] for start in starts]


def share_keys(count, rank, ranks, args):
    """One rank's batches of all images, each image in exactly one rank; shares differ by one at most."""
    mine = [(None, index) for index in range(rank, count, ranks)]
    return [mine[start : start + args.batch_size] for start in range(0, len(mine), args.batch_size)]


def batches(images, keys, args, device):
    """Pixels from -1 to 1 and labels, on the device, of each list of keys."""
    loader = DataLoader(
        images,
        batch_sampler=keys,
        num_workers=args.num_workers,
        pin_memory=device.type == "cuda",
        generator=torch.Generator(),  # else it draws from the one of dropout, and a resume would change that
    )
    try:
        for pixels, labels in loader:
            moved = pixels.to(device, non_blocking=True, memory_format=torch.channels_last)
            yield moved.float().div_(127.5).sub_(1), labels.to(device, non_blocking=True)
    except UnreadableImage as error:  # one that a worker met comes with that worker's traceback
        raise SystemExit(str(error).strip().split("UnreadableImage: ")[-1]) from None
