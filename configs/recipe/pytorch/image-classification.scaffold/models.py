"""The models that --architecture chooses from. For train.py; add yours to ARCHITECTURES."""

from torch import nn
from torch.nn import functional as F


def convolution(inside, outside, stride=1, size=3):
    layer = nn.Conv2d(inside, outside, size, stride, size // 2, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outside))


class Block(nn.Module):
    """Two convolutions and a way around them."""

    def __init__(self, inside, outside, stride):
        super().__init__()
        self.first, self.second = convolution(inside, outside, stride), convolution(outside, outside)
        self.around = nn.Identity() if inside == outside else convolution(inside, outside, stride, size=1)
        nn.init.zeros_(self.second[1].weight)  # begins as the way around, which steadies large batches

    def forward(self, x):
        return F.relu(self.second(F.relu(self.first(x))) + self.around(x))


def resnet18(channels, image_size):
    """ResNet-18 (He et al., 2015); images of up to 64 pixels keep their size at its entry."""
    if image_size <= 64:
        layers = [convolution(channels, 64), nn.ReLU()]
    else:
        layers = [convolution(channels, 64, stride=2, size=7), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    for inside, outside, stride in ((64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
    return layers, 512


def small_cnn(channels, image_size):
    """Three convolutions, for small images and first tries."""
    layers = []
    for inside, outside in ((channels, 16), (16, 32), (32, 64)):
        layers += [convolution(inside, outside), nn.ReLU(), nn.MaxPool2d(2, ceil_mode=True)]
    return layers, 64


ARCHITECTURES = {"resnet18": resnet18, "small-cnn": small_cnn}
"""Name → function of channels and image size: the layers, and how many channels come out of them."""


def build_model(args, classes):
    """The model, from pixels to a score for each class."""
    layers, width = ARCHITECTURES[args.architecture](3 if args.color else 1, args.image_size)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(args.dropout), nn.Linear(width, classes)]
    return nn.Sequential(*layers, *head)
