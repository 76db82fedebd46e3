"""Signatures of output folders: what they protect, and what is refused."""

import subprocess
import sys
from pathlib import Path

import pytest

import scalepoint
from scalepoint.errors import ScalepointError, UsageError, VerificationError
from tests.cli.conftest import child

pytest.importorskip("model_signing")
PASSWORD = "correct horse"  # noqa: S105  # of a key that exists for one test


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a private key, its public half, the same key encrypted, another public key, and an RSA key."""
    from cryptography.hazmat.primitives import serialization as forms
    from cryptography.hazmat.primitives.asymmetric import ec, rsa

    folder = tmp_path_factory.mktemp("keys")

    def save_private(name: str, key: ec.EllipticCurvePrivateKey | rsa.RSAPrivateKey, password: str = "") -> None:
        encryption = forms.BestAvailableEncryption(password.encode()) if password else forms.NoEncryption()
        pem = key.private_bytes(forms.Encoding.PEM, forms.PrivateFormat.PKCS8, encryption)
        (folder / name).write_bytes(pem)

    def save_public(name: str, key: ec.EllipticCurvePrivateKey) -> None:
        pem = key.public_key().public_bytes(forms.Encoding.PEM, forms.PublicFormat.SubjectPublicKeyInfo)
        (folder / name).write_bytes(pem)

    key, other = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    save_private("key.pem", key)
    save_private("encrypted.pem", key, PASSWORD)
    save_private("rsa.pem", rsa.generate_private_key(65537, 2048))
    save_private("other_curve.pem", ec.generate_private_key(ec.SECP256K1()))
    save_public("other_curve_public.pem", ec.generate_private_key(ec.SECP256K1()))
    save_public("public.pem", key)
    save_public("other.pem", other)
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    """A folder like an output of deploy; a signature does not depend on what the files contain."""
    folder = tmp_path / "out"
    (folder / "quantized").mkdir(parents=True)
    (folder / ".scalepoint").mkdir()
    (folder / "report.json").write_text("{}")
    (folder / "model.onnx").write_bytes(b"weights")
    (folder / "quantized" / "model.json").write_text("{}")
    return folder


def test_a_signed_folder_passes_also_after_it_was_moved(output: Path, keys: Path) -> None:
    assert scalepoint.sign(output, keys / "key.pem") == output / "model.sig"
    scalepoint.verify_signature(output, keys / "public.pem")
    moved = output.rename(output.with_name("moved"))
    (moved / ".scalepoint" / "lock").write_text("")  # the lock of a run is not part of the model
    scalepoint.verify_signature(moved, keys / "public.pem")


@pytest.mark.parametrize("change", ["edit", "add", "add hidden", "delete", "link"])
def test_a_changed_folder_is_refused_and_the_file_is_named(output: Path, keys: Path, change: str) -> None:
    scalepoint.sign(output, keys / "key.pem")
    file = output / "quantized" / "model.json"
    if change == "edit":
        file.write_text("[]")
    elif change == "add":
        file.with_name("model.json.py").write_text("")
    elif change == "add hidden":
        (output / ".git").mkdir()
        (output / ".git" / "model.json").write_text("")
    elif change == "delete":
        file.unlink()
    else:
        file.unlink()
        file.symlink_to(output / "report.json")
    with pytest.raises(VerificationError, match=r"model\.json"):
        scalepoint.verify_signature(output, keys / "public.pem")


def test_a_signature_of_another_key_is_refused(output: Path, keys: Path) -> None:
    scalepoint.sign(output, keys / "key.pem")
    with pytest.raises(VerificationError, match=r"(?i)key"):
        scalepoint.verify_signature(output, keys / "other.pem")


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "nonsense", '{"mediaType": 3}', '{"verificationMaterial": 1}', "\x00" * 9]
)
def test_a_damaged_signature_is_refused(output: Path, keys: Path, text: str) -> None:
    scalepoint.sign(output, keys / "key.pem")
    (output / "model.sig").write_text(text)
    with pytest.raises(VerificationError):
        scalepoint.verify_signature(output, keys / "public.pem")


def test_every_flipped_byte_of_a_signature_is_noticed(output: Path, keys: Path) -> None:
    """Except in the fields that the signature does not cover: the hint of the key and unused lists."""
    signature = scalepoint.sign(output, keys / "key.pem")
    data = signature.read_bytes()
    first = data.index(b'"payload":"') + len(b'"payload":"')
    last = data.index(b'"', first)
    for position in range(first, last, 97):
        signature.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(VerificationError):
            scalepoint.verify_signature(output, keys / "public.pem")


def test_an_encrypted_key_needs_its_password(output: Path, keys: Path) -> None:
    for password in (None, "wrong"):
        with pytest.raises(UsageError, match="password"):
            scalepoint.sign(output, keys / "encrypted.pem", password=password)
        assert not (output / "model.sig").exists()
    scalepoint.sign(output, keys / "encrypted.pem", password=PASSWORD)
    scalepoint.verify_signature(output, keys / "public.pem")


def test_what_cannot_be_signed_is_refused_before_anything_is_written(output: Path, keys: Path, tmp_path: Path) -> None:
    def refused(message: str, folder: Path, key: Path) -> None:
        with pytest.raises(ScalepointError, match=message):
            scalepoint.sign(folder, key)
        assert not (folder / "model.sig").exists()

    refused("elliptic", output, keys / "rsa.pem")
    refused("secp256k1", output, keys / "other_curve.pem")
    refused("no private key", output, keys / "public.pem")
    refused("missing", output, keys / "missing.pem")
    refused("output folder", tmp_path, keys / "key.pem")
    (output / "key.pem").write_bytes((keys / "key.pem").read_bytes())
    refused("shipped", output, output / "key.pem")
    (output / "key.pem").unlink()
    (output / "link").symlink_to(keys / "key.pem")
    refused("symlink", output, keys / "key.pem")


def test_an_earlier_signature_is_replaced_only_with_force(output: Path, keys: Path) -> None:
    scalepoint.sign(output, keys / "key.pem")
    (output / "model.onnx").write_bytes(b"other weights")
    with pytest.raises(UsageError, match="force"):
        scalepoint.sign(output, keys / "key.pem")
    scalepoint.sign(output, keys / "key.pem", force=True)
    scalepoint.verify_signature(output, keys / "public.pem")


def test_unsigned_folders_and_wrong_keys_are_usage_errors(output: Path, keys: Path) -> None:
    with pytest.raises(UsageError, match="scalepoint sign"):
        scalepoint.verify_signature(output, keys / "public.pem")
    scalepoint.sign(output, keys / "key.pem")
    with pytest.raises(UsageError, match="public key"):
        scalepoint.verify_signature(output, keys / "key.pem")
    with pytest.raises(UsageError, match="secp256k1"):
        scalepoint.verify_signature(output, keys / "other_curve_public.pem")


def test_the_tool_of_the_openssf_accepts_the_signature(output: Path, keys: Path) -> None:
    signature = scalepoint.sign(output, keys / "key.pem")
    command = [sys.executable, "-m", "model_signing", "verify", "key", str(output), "--signature", str(signature)]
    done = subprocess.run(
        [*command, "--public_key", str(keys / "public.pem")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_commands_sign_a_folder_and_refuse_a_changed_one(output: Path, keys: Path) -> None:
    done = child("sign", str(output), "--key", str(keys / "key.pem"))
    assert done.returncode == 0, done.stderr
    assert "model.sig" in done.stdout
    (output / "model.onnx").write_bytes(b"other weights")
    done = child("verify", str(output), "--signature", str(keys / "public.pem"))
    assert done.returncode == 4, done.stderr
    assert "model.onnx" in done.stderr
