"""Training as ordinary TensorFlow: TFRecord files in DATA_DIR, checkpoints in CHECKPOINT_DIR.

Nothing here knows that the directories are a bucket. Each record is an example of two features,
`x` (32 floats) and `y` (a class number). Where the operator set TF_CONFIG the workers share the
batches; BackupAndRestore writes a checkpoint after each epoch, and a new start goes on from it.
"""

from __future__ import annotations

import os
from pathlib import Path

import tensorflow as tf

DATA_DIR = Path(os.environ.get("DATA_DIR", "/data"))
CHECKPOINT_DIR = Path(os.environ.get("CHECKPOINT_DIR", "/checkpoints"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
FEATURES, CLASSES, BATCH = 32, 10, 64
FORMAT = {
    "x": tf.io.FixedLenFeature([FEATURES], tf.float32),
    "y": tf.io.FixedLenFeature([], tf.int64),
}


def parse(record: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    example = tf.io.parse_single_example(record, FORMAT)
    return example["x"], example["y"]


def main() -> None:
    distributed = "TF_CONFIG" in os.environ
    strategy = (
        tf.distribute.MultiWorkerMirroredStrategy() if distributed else tf.distribute.get_strategy()
    )
    files = sorted(str(path) for path in DATA_DIR.rglob("*.tfrecord"))
    if not files:
        raise SystemExit(f"no *.tfrecord below {DATA_DIR}")
    data = tf.data.Dataset.from_tensor_slices(files)
    # Several files at once: each reader waits for its own request to S3, where it is not cached.
    data = data.interleave(tf.data.TFRecordDataset, cycle_length=8, num_parallel_calls=8)
    data = data.map(parse).shuffle(10_000).batch(BATCH).prefetch(8)
    with strategy.scope():
        model = tf.keras.Sequential(
            [
                tf.keras.layers.Input([FEATURES]),
                tf.keras.layers.Dense(64, activation="relu"),
                tf.keras.layers.Dense(CLASSES),
            ]
        )
        loss = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("adam", loss)
    backup = tf.keras.callbacks.BackupAndRestore(CHECKPOINT_DIR / "backup", delete_checkpoint=False)
    model.fit(data, epochs=EPOCHS, callbacks=[backup], verbose=2)


if __name__ == "__main__":
    main()
