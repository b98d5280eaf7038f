"""Namespaces of the lab's own: whatever a lab run makes lives in them and dies with them.

Network cards, mounts, host names and processes of a run are known to the kernel as members of
namespaces that nothing but the run's own processes hold. When those end, however they end, the
kernel takes everything down: there is nothing on the machine to find, name or remove.
"""

from __future__ import annotations

import errno
import os
import select
import signal
from pathlib import Path
from typing import NoReturn

from slipstream.errors import LabError
from slipstream.lab import kernel

_ALL = kernel.NEW_NETWORK | kernel.NEW_MOUNTS | kernel.NEW_PIDS | kernel.NEW_HOSTNAME
_ROOT_OR_USER = (
    "run the lab as root, or where unprivileged user namespaces are allowed (in a container,"
    " the container must be allowed them too)"
)


def enter_namespaces() -> None:
    """Move this process, and the children it will have, to fresh namespaces.

    Without the right to make them it makes a user namespace first, in which it has that right and
    which maps its user to root. Raises LabError when the kernel refuses both.
    """
    try:
        kernel.unshare(_ALL)
    except PermissionError:
        _enter_user_namespace()
    except OSError as error:
        raise _refusal(error) from error


def _enter_user_namespace() -> None:
    user, group = os.geteuid(), os.getegid()
    try:
        kernel.unshare(kernel.NEW_USER | _ALL)
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    except OSError as error:
        raise _refusal(error) from error


def show_own_processes() -> None:
    """Give this process and its children a ``/proc`` that fits their PID namespace.

    Mounts that follow stay among them. Raises LabError when the kernel refuses.
    """
    try:
        kernel.make_mounts_private()
        kernel.mount_proc()
    except OSError as error:
        raise LabError(
            f"the lab may not mount /proc for its own processes ({error.strerror}): {advice()}"
        ) from error


def reap_until_killed(parent_alive: int) -> NoReturn:
    """Be process 1 of the PID namespace: adopt and reap orphans, and take all along when killed.

    parent_alive: end of a pipe that is at its end once the parent, which kills this process by
    dying, is gone.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    kernel.die_with_parent()
    exit_if_at_end(parent_alive)
    while True:
        signal.sigwait({signal.SIGCHLD})
        _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass
    except ChildProcessError:
        return


def exit_if_at_end(pipe: int) -> None:
    """End this process if nobody holds the other end of ``pipe`` any more."""
    if select.select([pipe], [], [], 0)[0]:
        os._exit(1)


def advice() -> str:
    """What to do where the kernel refuses namespaces, from the settings that are known to do so."""
    for name, value, sentence in (
        (
            "kernel/apparmor_restrict_unprivileged_userns",
            "1",
            "AppArmor takes the rights away from user namespaces here: run the lab as root, or"
            " allow them with `sysctl kernel.apparmor_restrict_unprivileged_userns=0`",
        ),
        (
            "kernel/unprivileged_userns_clone",
            "0",
            "only root may make user namespaces here: run the lab as root, or allow them with"
            " `sysctl kernel.unprivileged_userns_clone=1`",
        ),
        (
            "user/max_user_namespaces",
            "0",
            "user namespaces are switched off here: run the lab as root, or allow them with"
            " `sysctl user.max_user_namespaces=10000`",
        ),
        (
            "user/max_net_namespaces",
            "0",
            "network namespaces are switched off here: allow them with"
            " `sysctl user.max_net_namespaces=10000`",
        ),
    ):
        setting = Path("/proc/sys") / name
        if setting.is_file() and setting.read_text().strip() == value:
            return sentence
    return _ROOT_OR_USER


def _refusal(error: OSError) -> LabError:
    """The kernel's refusal in words."""
    if error.errno in (errno.EINVAL, errno.ENOSYS):
        return LabError(
            "this kernel lacks namespaces that the lab needs (CONFIG_NET_NS, CONFIG_PID_NS,"
            " CONFIG_UTS_NS, and CONFIG_USER_NS without root)"
        )
    return LabError(f"the kernel refuses namespaces ({error.strerror}): {advice()}")
