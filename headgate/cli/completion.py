"""`headgate completion`: a script that makes a shell complete commands and options, generated from them."""

from typing import Literal

from headgate.cli.arguments import options

Shell = Literal["bash", "zsh", "fish"]


def completion(shell: Shell, /) -> None:
    """Print a script that makes your shell complete headgate's commands and options.

    Args:
        shell: bash, zsh or fish. In bash and zsh: eval "$(headgate completion bash)".
    """
    print(script(shell))


def script(shell: Shell) -> str:
    from headgate.cli.entry import COMMANDS, FILE_OPTION

    words = {name: [*options(command), FILE_OPTION, "--help"] for name, command in COMMANDS.items()}
    if shell == "fish":
        bare = f"not __fish_seen_subcommand_from {' '.join(words)}"
        lines = [f"complete -c headgate -n '{bare}' -f -a {name}" for name in words]
        for name, flags in words.items():
            seen = f"-n '__fish_seen_subcommand_from {name}'"
            lines += [f"complete -c headgate {seen} -l {flag.removeprefix('--')}" for flag in flags]
        return "\n".join(lines)
    cases = "\n".join(f"    {name}) words='{' '.join(flags)}' ;;" for name, flags in words.items())
    first = "autoload -Uz compinit bashcompinit && compinit && bashcompinit\n" if shell == "zsh" else ""
    return f"""{first}_headgate() {{
  local words="${{COMP_WORDS[COMP_CWORD]}}" typed="${{COMP_WORDS[COMP_CWORD]}}"
  if [ "$COMP_CWORD" -eq 1 ]; then
    words='{" ".join(words)} --help --version'
  else
    case "${{COMP_WORDS[1]}}" in
{cases}
    esac
  fi
  case "$COMP_CWORD:$typed" in
  1:* | *:-*) COMPREPLY=($(compgen -W "$words" -- "$typed")) ;;
  *) COMPREPLY=() ;;
  esac
}}
complete -o default -F _headgate headgate"""
