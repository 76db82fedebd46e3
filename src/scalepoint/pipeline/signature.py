"""Signs output folders with a local key, and checks such signatures.

    out/ + private key --> sha256 of every file --> out/model.sig

The signature is a Sigstore bundle, as the OpenSSF tool `model_signing` writes it, whose command line checks it too.
Keys are elliptic curve keys in PEM files. Nothing is sent over the network.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from scalepoint.errors import UsageError, VerificationError, install_hint
from scalepoint.pipeline.workspace import WORK_FOLDER
from scalepoint.report.html import JSON_FILE
from scalepoint.support.files import TemporaryFolder, replace_bytes
from scalepoint.support.untrusted import read_bytes, read_json

SIGNATURE_FILE = "model.sig"
PASSWORD_VARIABLE = "SCALEPOINT_KEY_PASSWORD"  # noqa: S105  # the name of an environment variable
CURVES = ("secp256r1", "secp384r1", "secp521r1")  # of the keys that model_signing 1.1 takes
MAX_KEY_BYTES = 2**16
MAX_SIGNATURE_BYTES = 2**24  # about 100 bytes for each signed file
# What model_signing 1.1 and its parsers raise for a damaged signature, a wrong key, or files that differ.
_CHECK_ERRORS = (ValueError, KeyError, TypeError, AttributeError, IndexError, OSError)


def sign(folder: str | Path, key: str | Path, *, password: str | None = None, force: bool = False) -> Path:
    """Sign all files of an output folder.

    Sign as the last step: any file that is changed, added or deleted later makes the check fail. Only `.scalepoint`,
    the folder of unfinished runs, is not signed.

    Args:
        folder: An output folder of `deploy`.
        key: PEM file of an elliptic curve private key, for example made by
            `openssl ecparam -name prime256v1 -genkey -noout -out key.pem`.
        password: Password of the key; None if it is not encrypted.
        force: Replace an earlier signature.

    Returns:
        The path of the signature, `folder/model.sig`.

    Raises:
        UsageError: The folder is not an output folder or is already signed, the key cannot be used or lies in the
            folder, or the package `model_signing` is not installed.
    """
    folder, key = Path(folder), Path(key)
    if not (folder / JSON_FILE).is_file():
        raise UsageError(f"{folder} has no {JSON_FILE}: pass an output folder of `scalepoint deploy`")
    signature = folder / SIGNATURE_FILE
    if signature.exists() and not force:
        raise UsageError(f"{signature} already exists: replace it with force=True (--force)")
    if folder.resolve() in key.resolve().parents:
        raise UsageError(f"{key} lies in the folder that is signed, and would be shipped with it: move it away")
    _check_exists(key)
    hashing, signing = _import_model_signing("hashing", "signing")
    password_bytes = None if password is None else password.encode()
    _check_private_key(key, password_bytes)
    signer = signing.Config().set_hashing_config(_signed_files(hashing))
    signer.use_elliptic_key_signer(private_key=key, password=password_bytes)
    with TemporaryFolder() as temporary:
        try:
            signer.sign(folder, temporary / SIGNATURE_FILE)
        except ValueError as error:  # a symbolic link in the folder
            raise UsageError(f"{folder} cannot be signed: {error}") from error
        replace_bytes(signature, (temporary / SIGNATURE_FILE).read_bytes())
    return signature


def verify_signature(folder: str | Path, public_key: str | Path) -> None:
    """Check that the files of a folder are those that were signed.

    Args:
        folder: A folder that `sign` signed, also after it was moved or copied.
        public_key: PEM file of the public key, for example made by `openssl ec -in key.pem -pubout -out public.pem`.

    Raises:
        UsageError: The folder has no signature, the key is not a public key in PEM form, or `model_signing` is not
            installed.
        VerificationError: The signature is damaged or of another key, or a file was changed, added or deleted.
    """
    folder, public_key = Path(folder), Path(public_key)
    signature = folder / SIGNATURE_FILE
    if not signature.exists():
        raise UsageError(f"{folder} has no {SIGNATURE_FILE}: sign it with `scalepoint sign {folder} --key KEY.pem`")
    _check_exists(public_key)
    hashing, verifying = _import_model_signing("hashing", "verifying")
    _check_public_key(public_key)
    with _refusal(f"{signature} does not fit the files in {folder}"):
        if not isinstance(read_json(signature, MAX_SIGNATURE_BYTES, folder=folder), dict):
            raise ValueError("it is not a signature")
        verifier = verifying.Config().set_hashing_config(_signed_files(hashing))
        verifier.use_elliptic_key_verifier(public_key=public_key).verify(folder, signature)


@contextmanager
def _refusal(what: str) -> Iterator[None]:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415  # installed with model_signing

    try:
        yield
    except (InvalidSignature, *_CHECK_ERRORS) as error:
        # The message lists both hashes of a changed file; its name is enough.
        reason = re.sub(r"Hash mismatch for ('[^']*'): Expected .*?\)', Actual .*?\)'", r"changed: \1", str(error))
        name = "" if isinstance(error, ValueError) else f"{type(error).__name__} "
        raise VerificationError(f"{what}: {name}{reason or 'the signature is not valid'}: do not use them") from error


def _import_model_signing(*names: str) -> list[Any]:
    from importlib import import_module  # noqa: PLC0415

    try:
        return [import_module(f"model_signing.{name}") for name in names]
    except ImportError as error:
        raise UsageError(f"signatures need the package model_signing ({error}): {install_hint('signing')}") from error


def _signed_files(hashing: Any) -> Any:
    """Return which files count. Those of git count too: a file that nobody signed must not hide among them."""
    return hashing.Config().set_ignored_paths(paths=[SIGNATURE_FILE, WORK_FOLDER], ignore_git_paths=False)


def _check_exists(key: Path) -> None:
    if not key.exists():
        raise UsageError(f"{key}: there is no such file: pass the PEM file of a key")


def _check_private_key(path: Path, password: bytes | None) -> None:
    """Check that a key can sign. model_signing 1.1 raises AttributeError or TypeError for keys that cannot."""
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_private_key  # noqa: PLC0415

    pem = read_bytes(path, MAX_KEY_BYTES)
    try:
        key = load_pem_private_key(pem, password)
    except TypeError as error:  # encrypted without a password, or the reverse
        raise UsageError(
            f"{path}: {error}: set {PASSWORD_VARIABLE}, or password= in Python, to its password"
        ) from error
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is no private key in PEM form, or the password is wrong: {error}") from error
    _check_curve(path, key)


def _check_public_key(path: Path) -> None:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415
    from cryptography.hazmat.primitives.serialization import load_pem_public_key  # noqa: PLC0415

    pem = read_bytes(path, MAX_KEY_BYTES)
    try:
        key = load_pem_public_key(pem)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(f"{path} is not a public key in PEM form: pass the public half of the signing key") from error
    _check_curve(path, key)


def _check_curve(path: Path, key: Any) -> None:
    curve = getattr(getattr(key, "curve", None), "name", "none")  # keys of other kinds, such as RSA, have no curve
    if curve not in CURVES:
        raise UsageError(
            f"{path} must be an elliptic curve key of {', '.join(CURVES)}, got {curve}: make one with "
            "`openssl ecparam -name prime256v1 -genkey -noout -out key.pem`"
        )
