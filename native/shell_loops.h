/* What a stateful shell runs between commands. For shell.c alone. */
#ifndef SKERRY_SHELL_LOOPS_H
#define SKERRY_SHELL_LOOPS_H

/* Between commands -e, -a and -x are off; __skerry_o holds the last status and the options, as "0,ehB", and
 * __skerry_f what to put before a command to have them on again. Bash reads the loop anew with each command, so it is
 * short; behind it, after a NUL, is what to do on "r". */
static const char bash_loop[] =
    "while IFS= builtin read -r -u 8 __skerry_n; do\n"
    "if [[ $__skerry_n == r* ]]; then builtin eval \"$__skerry_r\"; builtin continue; fi\n"
    "(\n"
    "IFS= builtin read -r -d '' __skerry_c <\"$__skerry_d/$__skerry_n.c\"\n"
    "__skerry_f=\n"
    "if [[ $__skerry_o == *[aex]* ]]; then __skerry_f=${__skerry_o//[!aex]}; __skerry_f=\"builtin set -$__skerry_f; \"; fi\n"
    "{ builtin echo i >&9; [[ $__skerry_o == 0,* ]] || (builtin exit \"${__skerry_o%%,*}\");"
    " builtin eval \"$__skerry_f$__skerry_c\" 8<&- 9>&-; } <\"$__skerry_d/$__skerry_n.i\""
    " >\"$__skerry_d/$__skerry_n.o\" 2>\"$__skerry_d/$__skerry_n.e\"\n"
    "__skerry_o=$?,$-\n"
    "builtin set +aex\n"
    "[[ $__skerry_o != *a* ]] || builtin export -n __skerry_o\n"
    "builtin printf 'd %s %s\\n' \"${__skerry_o%%,*}\" \"$BASHPID\" >&9\n"
    "builtin eval \"$__skerry\"\n"
    "builtin exit\n"
    ")\n"
    "__skerry_o=$?,${__skerry_o#*,}\n"
    "builtin printf 'x %s\\n' \"${__skerry_o%%,*}\" >&9\n"
    "done\n"
    "\0"
    /* Options that change how text is read, and aliases, come after the functions, so that these are read as they
     * were written. `exec -c`: what was exported comes from the file, and so nothing of it can be too large, or be
     * taken by bash for settings of its own. When it does not work out, the shell goes on as it was. */
    "__skerry_f=$__skerry_d/${__skerry_n#r}.s\n"
    "{ builtin echo 'builtin shopt -s extglob' && builtin declare -p && builtin declare -f && builtin declare -F &&"
    " builtin shopt -p && builtin alias -p &&"
    " for ((__skerry_n = ${#DIRSTACK[@]} - 1; __skerry_n > 0; __skerry_n--)); do"
    " builtin printf 'builtin pushd -n -- %q\\n' \"${DIRSTACK[__skerry_n]}\"; done &&"
    " builtin printf 'builtin set --' && { (($# == 0)) || builtin printf ' %q' \"$@\"; } && builtin echo &&"
    " builtin set +o; } >|\"$__skerry_f\" 2>/dev/null && builtin shopt -s execfail &&"
    " builtin exec -c \"$__skerry_b\" --norc --noprofile -c '. \"$1\" >/dev/null 2>&1; builtin eval \"$__skerry\"'"
    " bash \"$__skerry_f\"\n"
    "builtin shopt -u execfail\n"
    "builtin echo >|\"$__skerry_f\"\n";

static const char sh_loop[] =
    "while IFS= read -r __skerry_n <&8; do\n"
    "case $__skerry_n in r*) continue;; esac\n"
    "(\n"
    "read -r __skerry_p __skerry_c </proc/self/stat\n"
    "{ echo i >&9; case $__skerry_o in *a*) set -a;; esac; case $__skerry_o in *e*) set -e;; 0,*) ;;"
    " *) (exit \"${__skerry_o%%,*}\");; esac; . \"$__skerry_d/$__skerry_n.c\" 8<&- 9>&-; } <\"$__skerry_d/$__skerry_n.i\""
    " >\"$__skerry_d/$__skerry_n.o\" 2>\"$__skerry_d/$__skerry_n.e\"\n"
    "__skerry_s=$?,$-\n"
    "set +ae\n"
    "__skerry_o=$__skerry_s\n"
    "unset -v __skerry_s\n"
    "echo \"d ${__skerry_o%%,*} $__skerry_p\" >&9\n"
    "eval \"$__skerry\"\n"
    "exit\n"
    ")\n"
    "__skerry_o=$?,${__skerry_o#*,}\n"
    "echo \"x ${__skerry_o%%,*}\" >&9\n"
    "done\n";

/* The loop comes by stdin, so that listings of processes stay readable. */
static const char bash_begin[] =
    "IFS= read -r -d '' __skerry; IFS= read -r -d '' __skerry_r; exec </dev/null;"
    " readonly __skerry __skerry_r __skerry_d=\"$1\" __skerry_b=\"$BASH\"; __skerry_o=0,; set --; eval \"$__skerry\"";
static const char sh_begin[] =
    "__skerry=$(cat); exec </dev/null; __skerry_d=$1; readonly __skerry __skerry_d; __skerry_o=0,; set --;"
    " eval \"$__skerry\"";

#endif
