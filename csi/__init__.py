"""The CSI driver: gives a bucket, or a prefix of one, to pods as a volume."""
