"""The CSI driver, which gives pods a bucket, or a prefix of a bucket, as a volume."""
