"""Commands that are agents: each runs in a folder and an environment of its own, and ends with its rollout.

- `command`: the records: what is to run, where, and how it ended
- `commands`: the commands of one rollout, which end when it does
- `local`: runs a command as a process of this machine
- `container`: runs a command, or several one after the other, in a container of Docker or Podman
- `root`: runs several in a root folder of their own, where there is neither
- `enter`: the script that enters a root folder
- `keeper`: the script beside each command that ends every process which came from it
"""
