"""Training as ordinary TensorFlow: TFRecord files in DATA_DIR, checkpoints in CHECKPOINT_DIR.

Nothing here knows that the directories are a bucket. Each record is an example of two features,
`x` (32 floats) and `y` (a class number). Where the operator set TF_CONFIG, each worker reads its
own part of the files, and gradients are averaged. The chief's checkpoints are kept, and a new start
goes on from the last.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import tensorflow as tf

DATA_DIR = Path(os.environ.get("DATA_DIR", "/data"))
CHECKPOINT_DIR = os.environ.get("CHECKPOINT_DIR", "/checkpoints")
EPOCHS = int(os.environ.get("EPOCHS", "3"))
FEATURES, CLASSES, BATCH, STEPS, RATE = 32, 10, 64, 30, 0.1
FORMAT = {
    "x": tf.io.FixedLenFeature([FEATURES], tf.float32),
    "y": tf.io.FixedLenFeature([], tf.int64),
}
TASK = json.loads(os.environ.get("TF_CONFIG", "{}")).get("task", {"type": "chief", "index": 0})


def batches(context: tf.distribute.InputContext) -> tf.data.Dataset:
    files = sorted(str(path) for path in DATA_DIR.rglob("*.tfrecord"))
    mine = files[context.input_pipeline_id :: context.num_input_pipelines]
    if not mine:
        raise SystemExit(f"fewer *.tfrecord below {DATA_DIR} than workers")
    data = tf.data.Dataset.from_tensor_slices(mine).repeat()
    # Several files at once: each reader waits for its own request to S3, where it is not cached.
    data = data.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=8)
    data = data.map(lambda record: tf.io.parse_single_example(record, FORMAT))
    return data.shuffle(1_000).batch(BATCH).prefetch(8)


def main() -> None:
    is_alone = "TF_CONFIG" not in os.environ
    strategy = (
        tf.distribute.get_strategy() if is_alone else tf.distribute.MultiWorkerMirroredStrategy()
    )
    mean = tf.VariableAggregation.MEAN
    epoch = tf.Variable(0, dtype=tf.int64)
    with strategy.scope():
        weights = tf.Variable(tf.zeros([FEATURES, CLASSES]), aggregation=mean)
        bias = tf.Variable(tf.zeros([CLASSES]), aggregation=mean)
    state = tf.train.Checkpoint(weights=weights, bias=bias, epoch=epoch)
    state.restore(tf.train.latest_checkpoint(CHECKPOINT_DIR))
    # Every worker has to take part, and each in a directory of its own.
    directory = CHECKPOINT_DIR if TASK["type"] == "chief" else tempfile.mkdtemp()
    manager = tf.train.CheckpointManager(state, directory, max_to_keep=3)

    def step(batch: dict[str, tf.Tensor]) -> tf.Tensor:
        with tf.GradientTape() as tape:
            logits = batch["x"] @ weights + bias
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["y"], logits)
            loss = tf.reduce_mean(losses)
        for variable, gradient in zip(
            (weights, bias), tape.gradient(loss, (weights, bias)), strict=True
        ):
            variable.assign_sub(RATE * gradient)
        return loss

    run = tf.function(lambda batch: strategy.run(step, args=(batch,)))
    data = iter(strategy.distribute_datasets_from_function(batches))
    while int(epoch) < EPOCHS:
        for _ in range(STEPS):
            loss = strategy.reduce("MEAN", run(next(data)), axis=None)
        epoch.assign_add(1)
        manager.save()
        print(f"epoch {int(epoch)} loss {float(loss):.4f}", flush=True)


if __name__ == "__main__":
    main()
