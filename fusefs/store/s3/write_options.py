"""What each object that a mount makes is sent with: class, encryption, ACL.

S3 takes these with the requests that begin an object: PUT, COPY and the beginning of a
multipart upload. botocore gets them as parameters, and requests of our own as headers.
A copy keeps the storage class of its source, as a rename is to change nothing but the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fusefs.settings.types import AttributeForm, Encryption

if TYPE_CHECKING:
    from fusefs.settings.mount import MountSettings

_OPERATIONS = ("PutObject", "CopyObject", "CreateMultipartUpload")
# Headers, and botocore's names for them.
_STORAGE_CLASS = ("x-amz-storage-class", "StorageClass")
_ENCRYPTION = ("x-amz-server-side-encryption", "ServerSideEncryption")
_KEY = ("x-amz-server-side-encryption-aws-kms-key-id", "SSEKMSKeyId")
_BUCKET_KEY = ("x-amz-server-side-encryption-bucket-key-enabled", "BucketKeyEnabled")
_ACL = ("x-amz-acl", "ACL")


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """None leaves a choice to the bucket. `kms_key` is an id, an ARN or an alias.

    With `is_aws_form` a copy says its source's time as AWS's services do, not as s3fs does.
    """

    storage_class: str | None = None
    encryption: str | None = None
    kms_key: str | None = None
    acl: str | None = None
    is_aws_form: bool = False

    @classmethod
    def of(cls, settings: MountSettings) -> WriteOptions:
        """What a mount's settings choose."""
        # A key alone is for the usual way of using it.
        encryption = settings.encryption or (Encryption.KMS if settings.kms_key else None)
        is_aws_form = settings.attribute_form is AttributeForm.AWS
        return cls(settings.storage_class, encryption, settings.kms_key, settings.acl, is_aws_form)

    def headers(self) -> dict[str, str]:
        """The headers, with names in lower case."""
        return {header: text for (header, _), text in self._texts().items()}

    def parameters(self) -> dict[str, Any]:
        """botocore's parameters."""
        parameters: dict[str, Any] = {name: text for (_, name), text in self._texts().items()}
        if _BUCKET_KEY[1] in parameters:
            parameters[_BUCKET_KEY[1]] = True
        return parameters

    def install(self, client: Any) -> None:
        """Have a boto3 client ask for it wherever a call says nothing else."""
        parameters = self.parameters()

        def add(params: dict[str, Any], **_: Any) -> None:
            for name, value in parameters.items():
                params.setdefault(name, value)

        if parameters:
            for operation in _OPERATIONS:
                client.meta.events.register(f"before-parameter-build.s3.{operation}", add)

    def _texts(self) -> dict[tuple[str, str], str]:
        chosen = {
            _STORAGE_CLASS: self.storage_class,
            _ENCRYPTION: self.encryption,
            _KEY: self.kms_key,
            # One request to KMS for many objects. S3 has no such keys for double encryption.
            _BUCKET_KEY: "true" if self.encryption == "aws:kms" else None,
            _ACL: self.acl,
        }
        return {names: text for names, text in chosen.items() if text is not None}


NO_OPTIONS = WriteOptions()
