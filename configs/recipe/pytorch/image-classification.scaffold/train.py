"""Image classification in PyTorch: data-parallel, mixed precision, exactly resumable. Needs torch and Pillow.

TunePlane starts this in every rank, with all parameters as arguments. By hand:

    python3 train.py --train-data DATA                                     # one process
    torchrun --standalone --nproc-per-node 8 train.py --train-data DATA    # eight GPUs of one machine

DATA holds train/<class>/* and validation/<class>/*. Started again with the same --output-dir, training goes on
after its last checkpoint: weights, optimiser, loss scale, step and random numbers are in it; learning rate, place
in the epoch, order of the images and their augmentation follow from step and seed.
"""

import argparse
import copy
import math
import os
import random
import shutil
import time
from pathlib import Path

import torch
import torch.distributed as dist
from data import batches, epoch_keys, read_folders, share_keys, unreadable
from models import ARCHITECTURES, build_model
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

try:
    from tuneplane import report
except ImportError:  # by hand where there is no TunePlane: the lines are printed all the same
    report = None

RANK, RANKS = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def parse_arguments():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add, switch = parser.add_argument, argparse.BooleanOptionalAction
    add("--train-data", type=Path, required=True, help="folder of train/<class>/* and validation/<class>/*")
    add("--output-dir", type=Path, default=Path(os.environ.get("TUNEPLANE_OUT_DIR", "out")))
    add("--architecture", choices=list(ARCHITECTURES), default="resnet18")
    add("--image-size", type=int, default=224, help="side of the square that images are scaled to, in pixels")
    add("--color", action=switch, default=True, help="three channels, or one of grey")
    add("--dropout", type=float, default=0.0, help="before the last layer")
    add("--augmentation", choices=["none", "crop", "crop-and-flip"], default="crop-and-flip")
    add(
        "--num-workers",
        type=int,
        default=4,
        help="processes of each rank that read images; 0: the rank itself",
    )
    add("--batch-size", type=int, default=64, help="images a step in each rank")
    add("--epochs", type=int, default=30)
    add("--max-steps", type=int, default=0, help="end after so many steps; 0: after the epochs")
    add("--optimizer", choices=["sgd", "adamw"], default="sgd")
    add("--learning-rate", type=float, default=0.1)
    add("--momentum", type=float, default=0.9, help="of sgd")
    add("--weight-decay", type=float, default=1e-4, help="of weights; biases and norms have none")
    add("--schedule", choices=["cosine", "step", "constant"], default="cosine")
    add("--warmup-steps", type=int, default=0, help="steps in which the learning rate grows to its full size")
    add("--decay-epochs", type=int, default=10, help="schedule step: epochs from one decay to the next")
    add("--decay-factor", type=float, default=0.1, help="schedule step: what each decay multiplies by")
    add("--label-smoothing", type=float, default=0.0)
    add("--gradient-clip", type=float, default=0.0, help="largest norm of a step's gradient; 0: any")
    add("--precision", choices=["fp32", "bf16", "fp16"], default="fp32")
    add("--seed", type=int, default=0)
    add("--deterministic", action=switch, default=False, help="the same bits again on GPUs too, more slowly")
    add("--log-every-steps", type=int, default=10)
    add("--eval-every-steps", type=int, default=0, help="0: after each epoch")
    add("--checkpoint-every-steps", type=int, default=500, help="0: at the end alone")
    add("--keep-checkpoints", type=int, default=2)
    return parser.parse_args()


# What ranks tell each other goes over the CPU (gloo), also where gradients go from GPU to GPU (nccl).


def total(*numbers, op=dist.ReduceOp.SUM):
    """Each number over all ranks."""
    values = torch.tensor(numbers, dtype=torch.float64)
    if RANKS > 1:
        dist.all_reduce(values, op)
    return values.tolist()


def gathered(thing):
    """What each rank has, by rank."""
    things = [thing] * RANKS
    if RANKS > 1:
        dist.all_gather_object(things, thing)
    return things


def say(text):
    if RANK == 0:
        print(text, flush=True)


def log(step, metrics):
    """A point of the curves, and its line."""
    say(f"step {step}  " + "  ".join(f"{name} {value:.6g}" for name, value in metrics.items()))
    if report is not None:
        report.log(metrics, step=step)


def build_optimizer(model, args):
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": args.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if args.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=args.learning_rate)
    return torch.optim.SGD(groups, lr=args.learning_rate, momentum=args.momentum)


def learning_rate(done, steps, epoch, args):
    """The rate of the step after `done` ones, of `steps` in all."""
    if done < args.warmup_steps:
        return args.learning_rate * (done + 1) / args.warmup_steps
    if args.schedule == "cosine":
        share = (done - args.warmup_steps) / max(1, steps - args.warmup_steps)
        return args.learning_rate * (1 + math.cos(math.pi * share)) / 2
    if args.schedule == "step":
        return args.learning_rate * args.decay_factor ** (epoch // args.decay_epochs)
    return args.learning_rate


class Training:
    """One training, in one of its ranks. `step` counts the steps that are done."""

    def __init__(self, args, device):
        self.args, self.device, self.step = args, device, 0
        self.train, self.validation = read_folders(args)
        self.check_images()
        self.steps_per_epoch = len(self.train) // (args.batch_size * RANKS)
        if self.steps_per_epoch == 0:
            what = f"{RANKS} ranks of batch size {args.batch_size}"
            raise SystemExit(f"the {len(self.train)} images to train on are less than one step of {what}")
        self.steps = min(args.epochs * self.steps_per_epoch, args.max_steps or math.inf)
        torch.manual_seed(args.seed)
        self.model = build_model(args, len(self.train.classes))
        self.model.to(device, memory_format=torch.channels_last)  # what convolutions are fastest on
        self.parallel = self.wrapped() if RANKS > 1 else self.model
        torch.manual_seed(args.seed + RANK)  # each rank drops out its own
        self.optimizer = build_optimizer(self.model, args)
        self.scaler = torch.amp.GradScaler(device.type, enabled=args.precision == "fp16")
        self.folder = args.output_dir / "checkpoints"

    def check_images(self):
        """Each rank looks at its share of the images; all end where one cannot be read."""
        paths = self.train.paths + self.validation.paths
        faults = [fault for share in gathered(unreadable(paths[RANK::RANKS])) for fault in share]
        if faults:
            count = f"{len(faults)} of {len(paths)} images"
            raise SystemExit(f"{count} cannot be read: {'; '.join(faults[:3])}{'; …' * (len(faults) > 3)}")

    def autocast(self):
        dtype = torch.float16 if self.args.precision == "fp16" else torch.bfloat16
        return torch.autocast(self.device.type, dtype, enabled=self.args.precision != "fp32")

    def wrapped(self):
        """The model, with gradients that are means over all ranks.

        After its first step DDP orders its buckets anew, and with them the sums over ranks. That step is made
        here, of nothing, or each start would show in the last bits.
        """
        ids = [self.device.index] if self.device.type == "cuda" else None
        parallel = DistributedDataParallel(self.model, device_ids=ids)
        before = copy.deepcopy(self.model.state_dict())
        side = self.args.image_size
        with self.autocast():
            scores = parallel(torch.zeros(2, 3 if self.args.color else 1, side, side, device=self.device))
        scores.float().sum().backward()
        self.model.zero_grad(set_to_none=True)
        self.model.load_state_dict(before)
        return parallel

    def run(self):
        """Train to the end, or to the step at which the run is asked to save and end."""
        args = self.args
        self.resume()
        if report is not None:
            resumed_at = self.step + 1 if self.step else None
            report.init(hparams=vars(args), monitor_hardware=True, resume_step=resumed_at)
        sizes = f"{len(self.train)} images of {len(self.train.classes)} classes"
        say(f"{sizes}, {RANKS} ranks on {self.device.type}, {self.steps} steps of {args.batch_size * RANKS}")
        stopped, images, since = False, 0, time.perf_counter()
        while self.step < self.steps and not stopped:
            epoch, begun = divmod(self.step, self.steps_per_epoch)
            keys = epoch_keys(len(self.train), epoch, begun, RANK, RANKS, args)
            for pixels, labels in batches(self.train, keys, args, self.device):
                rate = learning_rate(self.step, self.steps, epoch, args)
                loss = self.make_step(pixels, labels, rate)
                images += len(labels) * RANKS
                last = self.step == self.steps
                if last or self.step % args.log_every_steps == 0:
                    mean = total(loss.item())[0] / RANKS
                    speed = images / (time.perf_counter() - since)
                    images, since = 0, time.perf_counter()
                    curves = {
                        "train/loss": mean,
                        "train/learning_rate": rate,
                        "train/images_per_second": speed,
                    }
                    log(self.step, curves)
                    if not math.isfinite(mean):
                        raise SystemExit(
                            f"the loss is {mean}: try a lower --learning-rate or a --gradient-clip"
                        )
                paused = time.perf_counter()
                if last or self.step % (args.eval_every_steps or self.steps_per_epoch) == 0:
                    log(self.step, self.evaluate())
                asked = report is not None and report.should_stop()
                stopped = total(asked, op=dist.ReduceOp.MAX) == [1]  # all ranks after the same step
                every = args.checkpoint_every_steps
                if last or stopped or (every and self.step % every == 0):
                    self.save()
                since += time.perf_counter() - paused  # that was not training
                if last or stopped:
                    break
        say(f"step {self.step}  {'ends, as it was asked to' if stopped else 'done'}")
        if report is not None:
            report.finish()

    def make_step(self, pixels, labels, rate):
        """One step of the optimiser; this rank's loss."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        with self.autocast():
            scores = self.parallel(pixels)
        loss = F.cross_entropy(scores.float(), labels, label_smoothing=self.args.label_smoothing)
        self.optimizer.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        if self.args.gradient_clip > 0:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self.args.gradient_clip)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        return loss.detach()

    @torch.no_grad()
    def evaluate(self):
        """Loss and accuracy over every image exactly once, whatever the number of ranks."""
        if RANKS > 1:  # norms have seen other images in each rank; those that are saved are rank 0's
            for buffer in self.model.buffers():
                dist.broadcast(buffer, 0)
        self.model.eval()
        keys = share_keys(len(self.validation), RANK, RANKS, self.args)
        loss, right, count = torch.zeros(2, device=self.device), 0, 0
        for pixels, labels in batches(self.validation, keys, self.args, self.device):
            with self.autocast():
                scores = self.model(pixels).float()
            loss[0] += F.cross_entropy(scores, labels, reduction="sum")
            loss[1] += (scores.argmax(1) == labels).sum()
            count += len(labels)
        self.model.train()
        loss, right, count = total(*loss.tolist(), count)
        return {"validation/loss": loss / count, "validation/accuracy": right / count}

    def checkpoints(self):
        """Complete checkpoints, the oldest first."""
        found = [path for path in self.folder.glob("step-*") if path.name[5:].isdecimal()]
        return sorted(found, key=lambda path: int(path.name[5:]))

    def course(self):
        """What a training must have in common with one that it goes on from."""
        names = ("architecture", "image_size", "color", "augmentation", "batch_size", "optimizer", "seed")
        own = {name: getattr(self.args, name) for name in names}
        return {**own, "ranks": RANKS, "images": len(self.train), "classes": self.train.classes}

    def save(self):
        """Write step-N, whole or not at all, by rank 0; remove the oldest beyond those that are kept."""
        cuda = torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None
        rng = gathered({"python": random.getstate(), "torch": torch.get_rng_state(), "cuda": cuda})
        if RANK != 0:
            return
        for left in self.folder.glob(".step-*.partial"):
            shutil.rmtree(left)
        draft, target = (self.folder / name for name in (f".step-{self.step}.partial", f"step-{self.step}"))
        draft.mkdir(parents=True)
        weights = {"model": self.model.state_dict(), **self.course()}
        optimizer, scaler = self.optimizer.state_dict(), self.scaler.state_dict()
        state = {
            "step": self.step,
            "course": self.course(),
            "optimizer": optimizer,
            "scaler": scaler,
            "rng": rng,
        }
        for name, content in (("model.pt", weights), ("training.pt", state)):
            with (draft / name).open("wb") as file:
                torch.save(content, file)
                file.flush()
                os.fsync(file.fileno())
        draft.rename(target)
        for old in self.checkpoints()[: -self.args.keep_checkpoints]:
            shutil.rmtree(old)
        say(f"step {self.step}  saved {target}")

    def resume(self):
        """Take up the last complete checkpoint, where there is one."""
        found = gathered(self.checkpoints()[-1:])[0]  # in all ranks the one that rank 0 sees
        if not found:
            return
        weights, state = (
            torch.load(found[0] / name, "cpu", weights_only=True) for name in ("model.pt", "training.pt")
        )
        here = self.course()
        differ = [
            f"{name} was {was}, is {here[name]}" for name, was in state["course"].items() if was != here[name]
        ]
        if differ:
            raise SystemExit(
                f"{found[0]} is of another course: {'; '.join(differ)}; take another --output-dir"
            )
        self.model.load_state_dict(weights["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        own = state["rng"][RANK]
        random.setstate(own["python"])
        torch.set_rng_state(own["torch"])
        if own["cuda"] is not None and self.device.type == "cuda":
            torch.cuda.set_rng_state(own["cuda"], self.device)
        self.step = state["step"]
        say(f"step {self.step}  goes on from {found[0]}")


def main():
    args = parse_arguments()
    device = torch.device("cpu")
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if args.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # what cuBLAS asks for
        torch.use_deterministic_algorithms(True, warn_only=True)  # names an operation that has no such kernel
    if RANKS > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    try:
        Training(args, device).run()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
