/* Stateful shells: variables, functions, options and working directory live on from one command to the next.
 *
 * The shell is an ordinary bash (or sh) that runs a loop of ours. For each command it forks; the fork runs the
 * command and, having reached its end, says "d" (done) and goes on as the loop: it holds the new state in its
 * memory, nothing has to be saved or parsed. The guest then kills the shell that waited for it. A fork that does
 * not reach its end (exit, exec, set -e, killed at a timeout) leaves the shell that waited for it, which says "x"
 * and has the state from before the command. A command's own processes never share the shell's pipes: its stdio
 * are FIFOs made for it alone, and the loop's descriptors 8 and 9 are closed while it runs. Once it has opened them
 * it says "i": what was written to a FIFO that has no reader yet would be lost with the writer.
 *
 * The loop nests one level deeper with each command, so bash is now and then told ("r") to write its state to a
 * file and to start over from it. A plain sh cannot write its functions down, and is not.
 *
 * What the shell says is the workload's word: it can be forged from inside, and only misleads about that very
 * environment. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/fsuid.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "shell_loops.h"
#include "skerry.h"

#define DEPTH_MAX 128
#define LOOK_NS 50000000L /* between looks at a shell that runs a command, where it has no pidfd */
#define SHELLS_MAX 64
#define ROOM_NS 5000000L
#define ROOM_TRIES 200

struct shell {
    struct shell *next;
    char name[32];
    pid_t supervisor; /* 0: not started, or gone */
    pid_t pid;        /* the shell that waits for commands */
    int control;
    struct sk_source said, report, alive;
    struct sk_process *current;
    struct sk_process *killed; /* ended, with more of it to be killed */
    bool forked; /* the supervisor has started it */
    bool broken; /* no more commands for it; it stays while its supervisor does */
    uint32_t number;
    uint32_t state; /* the file that it starts over from; 0: none */
    unsigned depth;
    struct sk_tree *survivors; /* what earlier commands left running */
    char line[64];
    size_t line_len;
};

static struct shell *shells;
static uint32_t next_number;

static void path_of(char *out, size_t size, uint32_t number, const char *suffix)
{
    snprintf(out, size, "%s/%u.%s", sk_config.run, number, suffix);
}

static int write_file(uint32_t number, const char *suffix, const void *data, size_t len)
{
    char path[PATH_MAX];
    path_of(path, sizeof path, number, suffix);
    /* The directory is the workload's as well: nothing that it put there is followed or written to. */
    unlink(path);
    int fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (fd < 0)
        return -1;
    ssize_t n = write(fd, data, len);
    if (n == (ssize_t)len)
        return fd;
    if (n >= 0)
        errno = ENOSPC;
    close(fd);
    return -1;
}

/* A shell that writes its state to a file fills the directory for a moment if the state is too large for it. */
static int write_command(uint32_t number, const struct sk_start *start, bool writes_state)
{
    const struct timespec moment = { .tv_nsec = ROOM_NS };
    int fd = write_file(number, "c", start->command, start->command_len);
    for (int i = 0; i < ROOM_TRIES && fd < 0 && errno == ENOSPC && writes_state; i++) {
        nanosleep(&moment, NULL);
        fd = write_file(number, "c", start->command, start->command_len);
    }
    if (fd >= 0)
        close(fd);
    return fd;
}

/* A descriptor of the text that a new shell begins with; the file has no name any more. */
static int open_loop(bool bash)
{
    char path[PATH_MAX];
    int fd = write_file(0, "l", bash ? bash_loop : sh_loop, bash ? sizeof bash_loop - 1 : sizeof sh_loop - 1);
    path_of(path, sizeof path, 0, "l");
    unlink(path);
    if (fd >= 0)
        lseek(fd, 0, SEEK_SET);
    return fd;
}

static void remove_files(uint32_t number)
{
    char path[PATH_MAX];
    for (const char *suffix = "cioes"; *suffix; suffix++) {
        path_of(path, sizeof path, number, (char[2]){ *suffix, 0 });
        unlink(path);
    }
}

static void break_shell(struct shell *sh);

/* gVisor has no pidfds. */
static void look_ready(struct sk_source *source, uint32_t events)
{
    struct shell *sh = (struct shell *)((char *)source - offsetof(struct shell, alive));
    uint64_t times;
    (void)events;
    if (read(source->fd, &times, sizeof times) == sizeof times && kill(sh->pid, 0) < 0 && errno == ESRCH)
        break_shell(sh);
}

/* While a command runs: 0 ends it. */
static void look_after(struct shell *sh, long nanoseconds)
{
    struct itimerspec spec = { { 0, nanoseconds }, { 0, nanoseconds } };
    if (sh->alive.ready == look_ready)
        timerfd_settime(sh->alive.fd, 0, &spec, NULL);
}

static void finish(struct shell *sh, int code, int signo)
{
    struct sk_process *p = sh->current;
    if (p == NULL)
        return;
    sh->current = NULL;
    look_after(sh, 0);
    remove_files(sh->number);
    if (sh->state != 0)
        remove_files(sh->state); /* a command has run: it has been read */
    sh->state = 0;
    if (sk_process_killing(p)) {
        sh->killed = p;
    } else {
        free(sh->survivors);
        sh->survivors = NULL;
    }
    sk_process_exited(p, code, signo, NULL);
}

static void forget(struct shell *sh)
{
    for (struct shell **link = &shells; *link != NULL; link = &(*link)->next)
        if (*link == sh) {
            *link = sh->next;
            break;
        }
    sk_unwatch(&sh->said);
    sk_unwatch(&sh->report);
    sk_unwatch(&sh->alive);
    if (sh->control >= 0)
        close(sh->control);
    free(sh->survivors);
    free(sh);
}

/* The shell was killed from inside, or does not do its work. Its command ends with it; what earlier commands left
 * lives on. */
static void break_shell(struct shell *sh)
{
    static struct sk_tree tree;
    sk_unwatch(&sh->alive);
    sk_unwatch(&sh->said);
    sh->broken = true;
    sk_tree_read(&tree, sh->supervisor, 0, sh->survivors);
    for (size_t i = 0; i < tree.count && sh->current != NULL; i++)
        kill(tree.pids[i], SIGKILL);
    if (sh->control >= 0)
        close(sh->control);
    sh->control = -1;
    finish(sh, 128 + SIGKILL, SIGKILL);
}

static void alive_ready(struct sk_source *source, uint32_t events)
{
    (void)events;
    break_shell((struct shell *)((char *)source - offsetof(struct shell, alive)));
}

static void follow(struct shell *sh, pid_t pid)
{
    sk_unwatch(&sh->alive);
    sh->pid = pid;
    sh->alive = (struct sk_source){ .fd = (int)syscall(NR_PIDFD_OPEN, pid, 0), .ready = alive_ready };
    if (sh->alive.fd < 0 && errno == ENOSYS) {
        int timer = timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK);
        sh->alive = (struct sk_source){ .fd = timer, .ready = look_ready };
        look_after(sh, LOOK_NS);
    }
    if (sh->alive.fd < 0)
        break_shell(sh);
    else
        sk_watch(&sh->alive, EPOLLIN);
}

static void tell(struct shell *sh, const char *text)
{
    size_t len = strlen(text);
    bool told = sh->control < 0 || write(sh->control, text, len) == (ssize_t)len;
    if (!told && sh->forked) /* else its supervisor says why it could not be started */
        break_shell(sh);
}

static void heard(struct shell *sh, const char *line)
{
    int code = 0, pid = 0;
    if (strcmp(line, "i") == 0) {
        if (sh->current != NULL)
            sk_process_hold_input(sh->current, false);
    } else if (sscanf(line, "x %d", &code) == 1) {
        finish(sh, code & 255, 0);
    } else if (sscanf(line, "d %d %d", &code, &pid) == 2 && sh->current != NULL && !sk_process_killing(sh->current) &&
               sk_parent_of(pid) == sh->pid) {
        pid_t old = sh->pid;
        follow(sh, pid);
        if (sh->broken)
            return;
        kill(old, SIGKILL);
        finish(sh, code & 255, 0);
        if (++sh->depth >= DEPTH_MAX) {
            char order[16];
            sh->depth = 0;
            sh->state = ++next_number;
            snprintf(order, sizeof order, "r%u\n", sh->state);
            tell(sh, order);
        }
    }
    /* "d" of a fork that is dead, or being killed, is followed by an "x"; anything else is noise from inside. */
}

static void said_ready(struct sk_source *source, uint32_t events)
{
    struct shell *sh = (struct shell *)((char *)source - offsetof(struct shell, said));
    (void)events;
    ssize_t n = read(source->fd, sh->line + sh->line_len, sizeof sh->line - 1 - sh->line_len);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    if (n <= 0) {
        break_shell(sh);
        return;
    }
    sh->line_len += (size_t)n;
    sh->line[sh->line_len] = 0;
    for (char *end; (end = strchr(sh->line, '\n')) != NULL;) {
        *end = 0;
        char line[sizeof sh->line];
        memcpy(line, sh->line, sizeof line);
        sh->line_len -= (size_t)(end + 1 - sh->line);
        memmove(sh->line, end + 1, sh->line_len + 1);
        heard(sh, line);
        if (sh->broken)
            return;
    }
    if (sh->line_len == sizeof sh->line - 1)
        sh->line_len = 0; /* no line of the loop is that long */
}

void sk_shell_listen(const struct sk_process *process)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->current == process && sh->said.armed != 0) {
            said_ready(&sh->said, EPOLLIN);
            return;
        }
}

static void report_ready(struct sk_source *source, uint32_t events)
{
    struct shell *sh = (struct shell *)((char *)source - offsetof(struct shell, report));
    struct sk_report report;
    (void)events;
    ssize_t n = read(source->fd, &report, sizeof report);
    if (n < 0 && (errno == EAGAIN || errno == EINTR))
        return;
    sk_unwatch(source); /* only the start is of interest: the loop tells the rest */
    if (n == sizeof report && report.kind == SK_REPORT_STARTED) {
        sh->forked = true;
        follow(sh, report.value);
        if (!sh->broken)
            sk_watch(&sh->said, EPOLLIN); /* not before: what it says is checked against its pid */
        if (sh->current != NULL)
            sk_process_started(sh->current, 0);
        return;
    }
    struct sk_process *p = sh->current;
    sh->current = NULL;
    sh->broken = true;
    remove_files(sh->number);
    if (p != NULL && n == sizeof report)
        sk_process_abort(p, report.error, sk_step_text(report.value));
    else if (p != NULL) /* the supervisor was killed, perhaps by the command itself */
        sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);
}

/* ---- starting ---- */

static struct shell *find(const char *name)
{
    struct shell *sh = shells;
    while (sh != NULL && (sh->broken || strcmp(sh->name, name) != 0))
        sh = sh->next;
    return sh;
}

static struct shell *start_shell(const struct sk_start *start)
{
    static const char *const places[] = { "/bin/bash", "/usr/bin/bash", "/usr/local/bin/bash", "/bin/sh" };
    enum { NULL_FD, LOOP, CONTROL, SAID = CONTROL + 2, REPORT = SAID + 2, FDS = REPORT + 2 };
    int fds[FDS], *control = fds + CONTROL, *said = fds + SAID, *report = fds + REPORT;
    size_t place = 0;
    struct shell *sh = calloc(1, sizeof *sh);
    while (place < 3 && access(places[place], X_OK) < 0)
        place++;
    bool bash = place < 3;
    memset(fds, -1, sizeof fds);
    if (sh == NULL || (fds[NULL_FD] = open("/dev/null", O_RDWR | O_CLOEXEC)) < 0 || (fds[LOOP] = open_loop(bash)) < 0 ||
        pipe2(control, O_CLOEXEC) < 0 || pipe2(said, O_CLOEXEC) < 0 || pipe2(report, O_CLOEXEC) < 0) {
        int error = errno;
        for (size_t i = 0; i < FDS; i++)
            if (fds[i] >= 0)
                close(fds[i]);
        free(sh);
        errno = error;
        return NULL;
    }
    char *argv_bash[] = { (char *)(uintptr_t)places[place], "--norc", "--noprofile", "-c", (char *)(uintptr_t)bash_begin,
                          "bash", (char *)(uintptr_t)sk_config.run, NULL };
    char *argv_sh[] = { (char *)(uintptr_t)places[place], "-c", (char *)(uintptr_t)sh_begin, "sh",
                        (char *)(uintptr_t)sk_config.run, NULL };
    struct sk_start own = *start;
    own.argv = bash ? argv_bash : argv_sh;
    own.applet = NULL;
    int stdio[3] = { fds[LOOP], fds[NULL_FD], fds[NULL_FD] }, extra[2] = { sk_high(control[0]), sk_high(said[1]) };
    snprintf(sh->name, sizeof sh->name, "%s", start->shell);
    sh->control = control[1];
    sh->said = (struct sk_source){ .fd = said[0], .ready = said_ready };
    sh->report = (struct sk_source){ .fd = report[0], .ready = report_ready };
    sh->alive.fd = -1;
    sh->supervisor = sk_supervise(&own, stdio, false, report[1], extra);
    close(fds[NULL_FD]);
    close(fds[LOOP]);
    close(extra[0]);
    close(extra[1]);
    close(report[1]);
    sh->next = shells;
    shells = sh;
    if (sh->supervisor < 0) {
        sh->supervisor = 0;
        forget(sh);
        return NULL;
    }
    fcntl(control[1], F_SETFL, O_NONBLOCK); /* whoever fills it from inside shall not stop the guest */
    fcntl(said[0], F_SETFL, O_NONBLOCK);
    fcntl(report[0], F_SETFL, O_NONBLOCK);
    sk_watch(&sh->report, EPOLLIN);
    return sh;
}

/* Makes the FIFOs of one command and opens our ends. */
static int open_streams(uint32_t number, const struct sk_start *start, int ours[3])
{
    static const char *const suffixes[3] = { "i", "o", "e" };
    char path[PATH_MAX];
    for (int i = 0; i < 3; i++) {
        path_of(path, sizeof path, number, suffixes[i]);
        if (i == 0 && !(start->flags & SK_FLAG_STDIN)) {
            if (symlink("/dev/null", path) < 0)
                return -1;
            continue;
        }
        /* Input for reading as well: an open for writing alone would have to wait for the reader. */
        struct stat st;
        int flags = (i == 0 ? O_RDWR : O_RDONLY) | O_NONBLOCK | O_NOFOLLOW | O_CLOEXEC;
        if (mkfifo(path, 0600) < 0 || (ours[i] = open(path, flags)) < 0 || fstat(ours[i], &st) < 0)
            return -1;
        errno = EPERM;
        if (!S_ISFIFO(st.st_mode)) /* somebody inside was quicker */
            return -1;
    }
    return 0;
}

/* gVisor has no ids for files alone. Between two users a process loses the capabilities that are in force, and gets
 * them back from those that it may have. */
static void act_in_gvisor_as(uid_t uid, gid_t gid)
{
    struct capability_header header = { .version = CAPABILITY_VERSION };
    struct capability_data sets[2];
    prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0);
    if (setresuid((uid_t)-1, uid, (uid_t)-1) < 0 || syscall(SYS_capget, &header, sets) < 0)
        return;
    sets[0].effective = sets[0].permitted;
    if (syscall(SYS_capset, &header, sets) < 0 || setresgid((gid_t)-1, gid, (gid_t)-1) < 0)
        return; /* the files are then nobody's who could use them */
}

/* The files of a shell belong to its user, and to nobody else. */
static void act_as(uid_t uid, gid_t gid)
{
    if (!sk_config.switch_users)
        return;
    if (uid != sk_config.uid)
        chmod(sk_config.run, 01777); /* a place for others as well */
    if (sk_config.gvisor) {
        act_in_gvisor_as(uid, gid);
        return;
    }
    setfsgid(gid);
    setfsuid(uid);
}

void sk_shell_start(uint32_t id, const struct sk_start *start)
{
    static struct sk_tree tree;
    struct shell *sh = find(start->shell);
    size_t count = 0;
    for (struct shell *other = shells; other != NULL; other = other->next)
        count += !other->broken;
    if (sh == NULL && (count >= SHELLS_MAX || strlen(start->shell) >= sizeof sh->name)) {
        sk_send_error(id, count >= SHELLS_MAX ? EMFILE : ENAMETOOLONG, "shells");
        return;
    }
    if (sh != NULL && (sh->current != NULL || sh->killed != NULL)) {
        sk_send_error(id, EBUSY, "the shell is busy");
        return;
    }
    int ours[3] = { -1, -1, -1 };
    uint32_t number = ++next_number;
    struct sk_process *p = sk_process_new(id, start);
    if (p == NULL) {
        sk_send_error(id, ENOMEM, "processes");
        return;
    }
    act_as(start->uid, start->gid);
    int bad = write_command(number, start, sh != NULL && sh->state != 0) < 0 || open_streams(number, start, ours) < 0, error = errno;
    act_as(sk_config.uid, sk_config.gid);
    for (int i = 0; i < 3; i++)
        sk_process_stream(p, i, ours[i]);
    sk_process_hold_input(p, true);
    if (!bad && sh == NULL) {
        sh = start_shell(start);
        error = errno;
        bad = sh == NULL;
    }
    if (bad) {
        remove_files(number);
        sk_process_abort(p, error, "the shell could not be started");
        return;
    }
    if (sh->forked) {
        sk_tree_read(&tree, sh->supervisor, sh->pid, NULL);
        if (tree.count > 0 && (sh->survivors = malloc(sizeof *sh->survivors)) != NULL)
            memcpy(sh->survivors, &tree, sizeof tree);
        sk_process_started(p, 0);
    }
    sh->current = p;
    sh->number = number;
    look_after(sh, LOOK_NS);
    char line[16];
    snprintf(line, sizeof line, "%u\n", number);
    tell(sh, line);
}

bool sk_shell_tree(const struct sk_process *process, struct sk_tree *tree)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->current == process || sh->killed == process) {
            sk_tree_read(tree, sh->supervisor, sh->pid, sh->survivors);
            return true;
        }
    return false;
}

pid_t sk_shell_pid(const struct sk_process *process)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->current == process)
            return sh->pid;
    return 0;
}

bool sk_shell_break(const struct sk_process *process)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->current == process) {
            break_shell(sh);
            return true;
        }
    return false;
}

void sk_shell_detach(const struct sk_process *process)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->current == process) {
            sh->current = NULL;
        } else if (sh->killed == process) {
            sh->killed = NULL;
            free(sh->survivors);
            sh->survivors = NULL;
        }
}

bool sk_shell_owns(pid_t pid)
{
    struct shell *sh = shells;
    while (sh != NULL && sh->supervisor != pid)
        sh = sh->next;
    return sh != NULL;
}

bool sk_shell_reaped(pid_t pid)
{
    for (struct shell *sh = shells; sh != NULL; sh = sh->next)
        if (sh->supervisor == pid) {
            sh->supervisor = 0;
            if (sh->report.fd >= 0)
                report_ready(&sh->report, EPOLLIN); /* its last words may still be in the pipe */
            finish(sh, 128 + SIGKILL, SIGKILL);
            forget(sh);
            return true;
        }
    return false;
}
