import pytest

from quest_jax import memory
from quest_jax.memory import check_memory


def test_message_has_the_numbers(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 3_000_000_000)
    check_memory(2_500_000_000, 500_000_000, "model")
    with pytest.raises(MemoryError, match="are available; take a smaller batch.$"):
        check_memory(2_500_000_000, 510_000_000, "cache", "take a smaller batch")
    with pytest.raises(MemoryError, match=r"^model: needs 3.01 GB of host memory, but 3.00 GB .*bfloat16"):
        check_memory(2_500_000_000, 510_000_000, "model")


def test_unknown_platform_is_not_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: None)
    check_memory(10**18, 10**18, "model")


def test_accelerator_counts_its_own_memory(monkeypatch):
    class Device:
        platform = "gpu"

        def memory_stats(self):
            return {"bytes_limit": 1000, "bytes_in_use": 300}

        def __str__(self):
            return "gpu:0"

    monkeypatch.setattr(memory, "default_device", Device)
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 50)
    check_memory(700, 50, "model")  # the host holds one array at a time
    with pytest.raises(MemoryError, match="on gpu:0"):
        check_memory(701, 50, "model")
    with pytest.raises(MemoryError, match="of host memory"):
        check_memory(700, 51, "model")


def test_meminfo(monkeypatch):
    text = "MemTotal: 9 kB\nMemFree: 1 kB\nMemAvailable:   4 kB\nSwapFree: 2 kB\n"
    monkeypatch.setattr(memory, "_read", lambda path: text if path.name == "meminfo" else None)
    assert memory.available_host_bytes() == 6 * 1024
    monkeypatch.setattr(memory, "_read", lambda path: None)
    assert memory.available_host_bytes() is None


@pytest.mark.parametrize(("limit", "expected"), [("max\n", None), ("1000\n", 1000 - 700 + 50)])
def test_control_group(tmp_path, limit, expected):
    (tmp_path / "memory.max").write_text(limit)
    (tmp_path / "memory.current").write_text("700\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 50\nactive_file 7\n")
    assert memory._control_group_bytes(tmp_path) == expected
    assert memory._control_group_bytes(tmp_path / "none") is None
