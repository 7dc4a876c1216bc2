/* Role launch: executes lists of steps that the daemon sends, then becomes the guest.
 *
 * Descriptors at the start: 0 a socket to the daemon (SOCK_SEQPACKET), 1 and 2 /dev/null, 3 the guest's listening
 * socket. Each message of the daemon is a list of steps; the descriptors that come with it fill the slots from 0 on.
 * A step is u16 argc (little endian) followed by argc NUL-terminated strings. Steps of the first message that describe
 * the process itself are obeyed by the launching process, wherever they stand:
 *
 *   mode rootful|rootless|bare   bare: no namespaces at all (the fake backend)
 *   map UIDS GIDS                contents of uid_map and gid_map
 *   owner UID                    create the user namespace as this user of the host
 *   cgroup DIR                   be born in this cgroup (v2)
 *   tasks FILE                   open a v1 cgroup's `tasks`, for `join`
 *
 * The rest is executed in order by the new process:
 *
 *   join                         enter the v1 cgroups, and a cgroup namespace with the own cgroups as its root
 *   tree SLOT SOURCE FLAGS       a detached copy of a mount tree, "ro", "rec", "dev" in FLAGS
 *   stage                        an empty place in which /dev and /proc are prepared; paths are below it from now on
 *   newroot SLOT                 what will be /; paths are below it from now on
 *   move PATH                    what was mounted there in the stage, now in the new root
 *   dir PATH MODE, symlink PATH TARGET, file PATH CONTENT
 *   place SLOT PATH
 *   own PATH                     what is mounted there ("." is the new root) becomes this environment's alone
 *   complete PATH WITH           the same, and what it lacks of the directory WITH is there too
 *   volume SLOT PATH SUBDIR      a mount of which only a subdirectory shall be seen
 *   tmpfs PATH OPTIONS FLAGS ("noexec", "ro"), proc PATH, devpts PATH COUNT
 *   sysctl NAME VALUE            a setting of the own namespaces; skipped where the kernel does not have it
 *   mask PATH, readonly PATH     skipped where PATH does not exist
 *   seal PATH                    what is mounted there becomes read-only
 *   pivot                        leave the host's mounts for the new root, or for the stage if there is none yet
 *   enter                        from the stage into the new root
 *   hostname NAME, loopback, rlimit NUMBER VALUE
 *   bound                        nothing that is executed from now on can have a capability
 *   drop UID GID CAPABILITIES    the mask of those to keep
 *   allow PATH ro|rw             a Landlock rule
 *   confine SLOT                 no_new_privs, Landlock with these rules, the seccomp program
 *   guest KEY=VALUE...           the end: become the guest
 *   exec OUT ERR PATH ARG...     or: become this program, with these slots as its stdout and stderr
 *   machine OUT ERR STEPS COUNTER DISK TAP PATH ARG...
 *                                or: run this monitor of a virtual machine, whose first process gets the steps in that
 *                                slot and answers on OUT; DISK and TAP are slots or "-"; COUNTER holds how many processes its
 *                                kernel has killed for want of memory
 *   serve ERR PATH PROGRAM ARG... start a program with a listening socket at PATH as its descriptor 3
 *
 * The answers, a message each: "P<pid>" of the new process; "B" when a list without `guest` is done: send the next;
 * "W<tab>step<tab>errno<tab>detail" where a step could do less than it was asked to; "R": ready. The guest then waits
 * for a last message (which may have come before), with which the daemon says that it has written down whose it is:
 * without it, because the daemon died perhaps, it ends, and so does everything else here. "E<tab>step<tab>errno<tab>detail" ends the launch; the
 * daemon explains it to people.
 *
 * Role init: the guest as process 1 of a container or of a virtual machine that somebody else made. The steps are its
 * arguments, each after "--"; the answers go to stdout, a line each; nobody has to tell it to stay. It begins as root,
 * unless a step says `mode rootless`. More steps:
 *
 *   listen PATH                  make the guest's listening socket
 *   chmod PATH MODE
 *   open SLOT PATH               a file to read from, for `confine`
 *   bounding                     the first half of `bound`, for kernels without securebits
 *   shield UID                   after `drop`: real and saved id, for kernels that do not protect process 1 from its user
 *   processes PATH COUNT         a limit, by the cgroups (v1) that are mounted there
 *   unmount PATH
 *
 * Role boot (boot.c) is the first process of a virtual machine; the guest is its child, and gets its steps by the
 * machine's serial port. More, all but the last before there is a new root:
 *
 *   drivers DIRECTORY            load the modules in it: DIRECTORY/00 and so on
 *   interface NAME IPV4 IPV6     give a network device its addresses and the routes to everywhere
 *   mount TYPE SOURCE PATH FLAGS OPTIONS   "ro", "noexec", "noatime" in FLAGS
 *   write PATH TEXT              to a file that is there
 *   chown PATH UID GID           with mode 0755
 *   users COUNT                  a user namespace with COUNT users, the same as outside
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "kernel.h"
#include "launch.h"

enum { LISTENER = 3 }; /* the descriptor of the listening socket */

static bool rootful, bare;
static long owner = -1;
static const struct sk_cursor *program; /* of the step `exec` */

/* ---- the new process ---- */

static rlim_t guest_limit(const char *text)
{
    return strcmp(text, "-") == 0 ? RLIM_INFINITY : (rlim_t)sk_number("guest", text);
}

static void configure_guest(const struct sk_cursor *c)
{
    sk_config = (struct sk_guest_config){ .listen_fd = LISTENER };
    for (int i = 1; i < c->argc; i++) {
        char *value = strchr(c->argv[i], '=');
        errno = EINVAL;
        if (value == NULL)
            sk_fail("guest", c->argv[i]);
        *value++ = 0;
        const char *key = c->argv[i];
        if (strcmp(key, "workspace") == 0)
            sk_config.workspace = value;
        else if (strcmp(key, "tmp") == 0)
            sk_config.tmp = value;
        else if (strcmp(key, "run") == 0)
            sk_config.run = value;
        else if (strcmp(key, "uid") == 0)
            sk_config.uid = (uid_t)sk_number("guest", value);
        else if (strcmp(key, "gid") == 0)
            sk_config.gid = (gid_t)sk_number("guest", value);
        else if (strcmp(key, "switch") == 0)
            sk_config.switch_users = *value == '1';
        else if (strcmp(key, "gvisor") == 0)
            sk_config.gvisor = *value == '1';
        else if (strcmp(key, "strangers") == 0)
            sk_config.strangers_only = *value == '1';
        else if (strcmp(key, "fds") == 0)
            sk_config.fds = guest_limit(value);
        else if (strcmp(key, "processes") == 0)
            sk_config.processes = guest_limit(value);
        else if (strcmp(key, "data") == 0)
            sk_config.data = guest_limit(value);
        else if (strcmp(key, "file_size") == 0)
            sk_config.file_size = guest_limit(value);
        else if (strcmp(key, "orphan_ms") == 0)
            sk_config.orphan_ms = (uint64_t)sk_number("guest", value);
        else
            sk_fail("guest", key);
    }
    sk_roots.workspace_path = sk_config.workspace;
    sk_roots.tmp_path = sk_config.tmp;
    const int flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
    sk_roots.workspace_fd = (int)sk_check(open(sk_config.workspace, flags), "guest", sk_config.workspace);
    sk_roots.tmp_fd = (int)sk_check(open(sk_config.tmp, flags), "guest", sk_config.tmp);
    sk_check(chdir(sk_config.workspace), "guest", "workspace");
}

/* Steps of the launching process, which has obeyed them. */
static bool of_the_launcher(const struct sk_cursor *c)
{
    static const char *const names[] = { "mode", "map", "owner", "cgroup", "tasks" };
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (strcmp(c->argv[0], names[i]) == 0)
            return true;
    return false;
}

static void keep_program(const struct sk_cursor *c, int least)
{
    static struct sk_cursor kept;
    errno = EINVAL;
    if (c->argc < least)
        sk_fail(c->argv[0], "number of arguments");
    kept = *c;
    program = &kept;
}

int sk_listen(const char *step, const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    errno = ENAMETOOLONG;
    if (strlen(path) >= sizeof address.sun_path)
        sk_fail(step, path);
    strcpy(address.sun_path, path);
    int fd = (int)sk_check(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0), step, "socket");
    sk_check(bind(fd, (struct sockaddr *)&address, sizeof address), step, path);
    sk_check(listen(fd, 16), step, path);
    return fd;
}

static void listen_at(const char *path)
{
    int fd = sk_listen("listen", path);
    if (fd != LISTENER) {
        sk_check(dup3(fd, LISTENER, O_CLOEXEC), "listen", path);
        close(fd);
    }
}

void sk_write(const char *path, const char *text)
{
    int fd = (int)sk_check(open(path, O_WRONLY | O_CLOEXEC), "write", path);
    sk_check(write(fd, text, strlen(text)), "write", path);
    close(fd);
}

static void mount_at(const struct sk_cursor *c)
{
    static const struct {
        const char *name;
        unsigned long flag;
    } flags[] = { { "ro", MS_RDONLY }, { "noexec", MS_NOEXEC }, { "noatime", MS_NOATIME } };
    unsigned long wanted = MS_NOSUID | MS_NODEV;
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (strstr(c->argv[4], flags[i].name))
            wanted |= flags[i].flag;
    sk_check(mount(c->argv[2], c->argv[3], c->argv[1], wanted, c->argv[5]), "mount", c->argv[2]);
}

static void limit_processes(const char *mounts, const char *count)
{
    char path[PATH_MAX];
    snprintf(path, sizeof path, "%s/pids/skerry", mounts);
    sk_check(mkdir(path, 0755), "processes", path);
    snprintf(path, sizeof path, "%s/pids/skerry/pids.max", mounts);
    sk_write(path, count);
    snprintf(path, sizeof path, "%s/pids/skerry/cgroup.procs", mounts);
    sk_write(path, "1");
}

static void execute(const struct sk_cursor *c)
{
    if (sk_mount_step(c) || sk_privilege_step(c, rootful))
        return;
    if (strcmp(c->argv[0], "guest") == 0) {
        configure_guest(c);
    } else if (strcmp(c->argv[0], "exec") == 0) {
        keep_program(c, 5);
    } else if (strcmp(c->argv[0], "machine") == 0) {
        keep_program(c, 9);
    } else if (strcmp(c->argv[0], "serve") == 0) {
        sk_serve_step(c);
    } else if (sk_is_step(c, "drivers", 1)) {
        sk_load_modules(c->argv[1]);
    } else if (sk_is_step(c, "mount", 5)) {
        mount_at(c);
    } else if (sk_is_step(c, "write", 2)) {
        sk_write(c->argv[1], c->argv[2]);
    } else if (sk_is_step(c, "chown", 3)) {
        uid_t uid = (uid_t)sk_number("chown", c->argv[2]);
        sk_check(chown(c->argv[1], uid, (gid_t)sk_number("chown", c->argv[3])), "chown", c->argv[1]);
        sk_check(chmod(c->argv[1], 0755), "chown", c->argv[1]);
    } else if (sk_is_step(c, "listen", 1)) {
        listen_at(c->argv[1]);
    } else if (sk_is_step(c, "chmod", 2)) {
        sk_check(chmod(c->argv[1], (mode_t)sk_number("chmod", c->argv[2])), "chmod", c->argv[1]);
    } else if (sk_is_step(c, "processes", 2)) {
        limit_processes(c->argv[1], c->argv[2]);
    } else if (sk_is_step(c, "unmount", 1)) {
        sk_check(umount2(c->argv[1], MNT_DETACH), "unmount", c->argv[1]);
    } else if (sk_is_step(c, "open", 2)) {
        int n = sk_slot("open", c->argv[1]);
        sk_slots[n] = (int)sk_check(open(c->argv[2], O_RDONLY | O_CLOEXEC), "open", c->argv[2]);
    } else if (!of_the_launcher(c)) {
        errno = EINVAL;
        sk_fail("unknown-step", c->argv[0]);
    }
}

static void run_steps(void)
{
    struct sk_cursor c = { 0 };
    while (sk_next_step(&c))
        execute(&c);
}

/* Out of the way of the numbers that descriptors get in the end. */
static int raise_fd(int fd, const char *what)
{
    return (int)sk_check(fcntl(fd, F_DUPFD_CLOEXEC, 200), "descriptors", what);
}

/* The last step, when the daemon has noted whose process this is. It may be gone: then nobody says so. */
void sk_wait_for_the_last_word(void)
{
    char last;
    sk_tell_daemon("R");
    if (recv(sk_control_fd, &last, 1, 0) != 1)
        _exit(1);
    close(sk_control_fd);
}

/* 0 is /dev/null, 1 and 2 are the slots that it named, 3 is the guest's listening socket. */
static _Noreturn void become_program(void)
{
    static char *nothing[] = { NULL };
    int null = raise_fd((int)sk_check(open("/dev/null", O_RDWR), "descriptors", "/dev/null"), "null");
    int out = raise_fd(sk_slots[sk_slot("exec", program->argv[1])], "stdout");
    int err = raise_fd(sk_slots[sk_slot("exec", program->argv[2])], "stderr");
    sk_control_fd = raise_fd(sk_control_fd, "control");
    const int standard[] = { null, out, err };
    for (int fd = 0; fd < 3; fd++)
        sk_check(dup2(standard[fd], fd), "descriptors", "dup2");
    sk_check(dup3(sk_control_fd, 4, O_CLOEXEC), "descriptors", "dup3");
    sk_control_fd = 4;
    sk_check(fcntl(LISTENER, F_SETFD, 0), "descriptors", "listening socket");
    sk_check(syscall(NR_CLOSE_RANGE, 5u, LAST_FD, 0), "descriptors", "close_range");
    const char *path = program->argv[3];
    int fd = (int)sk_check(open(path, O_PATH | O_CLOEXEC), "exec", path);
    close(fd); /* said while somebody listens */
    sk_wait_for_the_last_word();
    execve(path, (char **)(uintptr_t)program->argv + 3, nothing);
    _exit(127);
}

/* 0 to 2 are /dev/null, 3 is the listening socket, 4 and 5 the roots, 6 the daemon for a last word, 7 where processes
 * ask about filters. */
static void settle_descriptors(void)
{
    int null = (int)sk_check(open("/dev/null", O_RDWR), "descriptors", "/dev/null");
    null = raise_fd(null, "null");
    int workspace = raise_fd(sk_roots.workspace_fd, "workspace"), tmp = raise_fd(sk_roots.tmp_fd, "tmp");
    sk_control_fd = raise_fd(sk_control_fd, "control");
    if (sk_filters_fd >= 0)
        sk_filters_fd = raise_fd(sk_filters_fd, "filters");
    for (int fd = 0; fd < 3; fd++)
        sk_check(dup2(null, fd), "descriptors", "dup2");
    sk_check(dup3(workspace, 4, O_CLOEXEC), "descriptors", "dup3");
    sk_check(dup3(tmp, 5, O_CLOEXEC), "descriptors", "dup3");
    sk_check(dup3(sk_control_fd, 6, O_CLOEXEC), "descriptors", "dup3");
    sk_control_fd = 6;
    if (sk_filters_fd >= 0)
        sk_filters_fd = (int)sk_check(dup3(sk_filters_fd, 7, O_CLOEXEC), "descriptors", "dup3");
    sk_check(fcntl(LISTENER, F_SETFD, FD_CLOEXEC), "descriptors", "listening socket");
    sk_check(syscall(NR_CLOSE_RANGE, sk_filters_fd >= 0 ? 8u : 7u, LAST_FD, 0), "descriptors", "close_range");
    sk_roots.workspace_fd = 4;
    sk_roots.tmp_fd = 5;
    /* No process inside, of whatever user, may look into this one. */
    sk_check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable", "");
    prctl(PR_SET_NAME, "skerry-init", 0, 0, 0);
}

static _Noreturn void become_what_is_asked(void)
{
    if (setsid() < 0 && !bare)
        sk_fail("setsid", "");
    /* The session keyring of whoever started the daemon does not come along. */
    syscall(SYS_keyctl, 1 /* join a new session keyring */, NULL);
    /* Nothing goes out to the host's mounts. What the host unmounts while this one waits for its steps must not be
     * held by it, so unmounts do come in. */
    if (!bare)
        sk_check(mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL), "own-mounts", "/");
    run_steps();
    while (sk_config.workspace == NULL && program == NULL) {
        sk_tell_daemon("B");
        sk_receive_steps();
        run_steps();
    }
    if (program != NULL && strcmp(program->argv[0], "machine") == 0)
        sk_become_machine(program);
    if (program != NULL)
        become_program();
    settle_descriptors();
    sk_wait_for_the_last_word();
    _exit(sk_guest_main());
}

/* ---- the launching process ---- */

static void write_map(pid_t pid, const char *file, const char *content)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    int fd = (int)sk_check(open(path, O_WRONLY | O_CLOEXEC), "map", file);
    size_t len = strlen(content);
    if (write(fd, content, len) != (ssize_t)len)
        sk_fail("map", file);
    close(fd);
}

/* What the daemon ignores, or its C library does, nobody inside shall. By hand: libraries keep some for themselves. */
static void default_signals(void)
{
    static const uint64_t nothing[4];
    for (int number = 1; number <= 64; number++)
        syscall(SYS_rt_sigaction, number, nothing, NULL, 8);
}

/* The kernel charges what a user namespace uses (inotify, message queues, pending signals, namespaces) to a user
 * inside and also to the user that created it. Were that root, all environments would share root's limits. The
 * capabilities stay: the cgroup and the maps still need them. */
static void become_owner(void)
{
    sk_check(prctl(PR_SET_SECUREBITS, SECUREBIT_NO_SETUID_FIXUP, 0, 0, 0), "owner", "securebits");
    sk_check(setresuid((uid_t)owner, (uid_t)owner, (uid_t)owner), "owner", "setresuid");
}

/* A daemon that the kernel shall spare has a negative score, which is not for what it starts. Written with root's
 * capabilities it is also the least to which anybody inside can set it. */
static void reset_oom_score(void)
{
    char score[16] = "";
    int fd = (int)sk_check(open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC), "oom-score", "open");
    sk_check(read(fd, score, sizeof score - 1), "oom-score", "read");
    if (*score == '-')
        strcpy(score, "0");
    sk_check(write(fd, score, strlen(score)), "oom-score", "write");
    close(fd);
}

static struct { /* what the steps of the launching process ask for */
    char *uids, *gids, *cgroup;
} wanted;

static void read_own_steps(void)
{
    struct sk_cursor c = { 0 };
    while (sk_next_step(&c)) {
        if (sk_is_step(&c, "mode", 1)) {
            rootful = strcmp(c.argv[1], "rootful") == 0;
            bare = strcmp(c.argv[1], "bare") == 0;
        } else if (sk_is_step(&c, "map", 2)) {
            wanted.uids = c.argv[1];
            wanted.gids = c.argv[2];
        } else if (sk_is_step(&c, "owner", 1)) {
            owner = sk_number("owner", c.argv[1]);
        } else if (sk_is_step(&c, "cgroup", 1)) {
            wanted.cgroup = c.argv[1];
        } else if (sk_is_step(&c, "tasks", 1)) {
            sk_join_later(c.argv[1]);
        }
    }
}

static void tell_pid(pid_t pid)
{
    char started[32];
    snprintf(started, sizeof started, "P%d", (int)pid);
    sk_tell_daemon(started);
}

/* In the new namespaces, once the maps are written. */
static _Noreturn void begin_inside(int sync)
{
    char go;
    /* EOF: the parent failed, and has said so. */
    if (read(sync, &go, 1) != 1)
        _exit(1);
    close(sync);
    if (rootful) {
        sk_check(setgroups(0, NULL), "users", "setgroups");
        sk_check(setresgid(0, 0, 0), "users", "setresgid");
        sk_check(setresuid(0, 0, 0), "users", "setresuid");
    }
    become_what_is_asked();
}

int sk_launch_main(void)
{
    int sync[2];

    umask(022);
    default_signals();
    signal(SIGPIPE, SIG_IGN);
    sk_check(fcntl(sk_control_fd, F_SETFD, FD_CLOEXEC), "control", "");
    sk_check(chdir("/"), "chdir", "/");
    sk_receive_steps();
    read_own_steps();
    if (bare) {
        tell_pid(getpid());
        sk_check(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper", "");
        become_what_is_asked();
    }
    errno = EINVAL;
    if (wanted.uids == NULL)
        sk_fail("map", "missing");
    sk_check(pipe2(sync, O_CLOEXEC), "pipe", "");
    struct clone_request args = { .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                                         CLONE_NEWUTS | CLONE_PARENT };
    if (wanted.cgroup != NULL) {
        args.flags |= INTO_CGROUP;
        args.cgroup = (uint64_t)sk_check(open(wanted.cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC), "cgroup", wanted.cgroup);
    }
    reset_oom_score();
    if (owner >= 0)
        become_owner();
    pid_t pid = (pid_t)sk_check(syscall(NR_CLONE3, &args, sizeof args), "namespaces", wanted.cgroup ? wanted.cgroup : "");
    if (pid == 0) {
        close(sync[1]);
        begin_inside(sync[0]);
    }
    tell_pid(pid);
    if (!rootful)
        write_map(pid, "setgroups", "deny");
    write_map(pid, "uid_map", wanted.uids);
    write_map(pid, "gid_map", wanted.gids);
    sk_check(write(sync[1], "g", 1), "go", "");
    return 0;
}

/* ---- role init ---- */

int sk_init_main(int argc, char **argv)
{
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    sk_answer_lines(STDOUT_FILENO);
    sk_take_steps(argc, argv);
    return sk_become_init();
}

int sk_become_init(void)
{
    rootful = true;
    read_own_steps();
    setsid();
    run_steps();
    errno = EINVAL;
    if (sk_config.workspace == NULL)
        sk_fail("guest", "missing");
    settle_descriptors();
    sk_tell_daemon("R");
    close(sk_control_fd);
    return sk_guest_main();
}
