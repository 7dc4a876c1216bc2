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
 *
 * The answers, a message each: "P<pid>" of the new process; "B" when a list without `guest` is done: send the next;
 * "W<tab>step<tab>errno<tab>detail" where a step could do less than it was asked to; "R": ready. The guest then waits
 * for a last message (which may have come before), with which the daemon says that it has written down whose it is:
 * without it, because the daemon died perhaps, it ends, and so does everything else here. "E<tab>step<tab>errno<tab>detail" ends the launch; the
 * daemon explains it to people.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <net/if.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <grp.h>
#include <unistd.h>

#include "kernel.h"
#include "skerry.h"

enum { STEPS_MAX = 128 * 1024, ARGS_MAX = 16, SLOTS_MAX = 64, ALLOW_MAX = 32, TASKS_MAX = 16 };

static char steps[STEPS_MAX];
static size_t steps_len;
static int control_fd = 0;
static int slots[SLOTS_MAX];
static int root_fd = -1, stage_fd = -1;
static const char *stage_path = "/proc"; /* where it covers the host's, until it is / itself */
static bool rootful, bare;
static long owner = -1;

static struct {
    char *path;
    bool writable;
} allowed[ALLOW_MAX];
static size_t allowed_count;
static int tasks[TASKS_MAX];
static size_t tasks_count;

static void say(const char *message)
{
    /* A daemon that is gone does not hear it; the next message that does not come ends us. */
    (void)send(control_fd, message, strlen(message), MSG_NOSIGNAL);
}

static void complain(char kind, const char *step, const char *detail)
{
    char message[512];
    snprintf(message, sizeof message, "%c\t%s\t%d\t%s", kind, step, errno, detail);
    say(message);
}

static _Noreturn void fail(const char *step, const char *detail)
{
    complain('E', step, detail);
    _exit(1);
}

static long check(long result, const char *step, const char *detail)
{
    if (result < 0)
        fail(step, detail);
    return result;
}

/* ---- the lists ---- */

struct cursor {
    size_t at;
    int argc;
    char *argv[ARGS_MAX];
};

/* The daemon's next message, which replaces the one before. Its end is ours. */
static void receive(void)
{
    union {
        struct cmsghdr header;
        char space[CMSG_SPACE(sizeof slots)];
    } ancillary;
    struct iovec data = { .iov_base = steps, .iov_len = sizeof steps };
    struct msghdr message = {
        .msg_iov = &data, .msg_iovlen = 1, .msg_control = &ancillary, .msg_controllen = sizeof ancillary
    };
    ssize_t n;
    do
        n = recvmsg(control_fd, &message, MSG_CMSG_CLOEXEC);
    while (n < 0 && errno == EINTR);
    if (n == 0)
        _exit(1);
    check(n, "receive", "");
    errno = EMSGSIZE;
    if (message.msg_flags & (MSG_TRUNC | MSG_CTRUNC))
        fail("receive", "too much at once");
    steps_len = (size_t)n;
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    if (header != NULL && header->cmsg_level == SOL_SOCKET && header->cmsg_type == SCM_RIGHTS)
        memcpy(slots, CMSG_DATA(header), header->cmsg_len - CMSG_LEN(0));
}

static bool next_step(struct cursor *c)
{
    if (c->at == steps_len)
        return false;
    errno = EINVAL;
    if (steps_len - c->at < 2)
        fail("steps", "truncated");
    c->argc = sk_get16((uint8_t *)steps + c->at);
    c->at += 2;
    if (c->argc < 1 || c->argc > ARGS_MAX)
        fail("steps", "number of arguments");
    for (int i = 0; i < c->argc; i++) {
        char *end = memchr(steps + c->at, 0, steps_len - c->at);
        if (end == NULL)
            fail("steps", "unterminated argument");
        c->argv[i] = steps + c->at;
        c->at = (size_t)(end - steps) + 1;
    }
    return true;
}

static bool is(const struct cursor *c, const char *name, int arguments)
{
    if (strcmp(c->argv[0], name) != 0)
        return false;
    errno = EINVAL;
    if (c->argc != arguments + 1)
        fail(name, "number of arguments");
    return true;
}

static long number(const char *step, const char *text)
{
    char *end;
    errno = EINVAL;
    long value = strtol(text, &end, 0);
    if (*text == 0 || *end != 0)
        fail(step, text);
    return value;
}

static int slot(const char *step, const char *text)
{
    long n = number(step, text);
    errno = EINVAL;
    if (n < 0 || n >= SLOTS_MAX)
        fail(step, "slot out of range");
    return (int)n;
}

/* ---- mounts ---- */

static int set_attributes(int fd, unsigned flags, uint64_t set, uint64_t propagation)
{
    struct mount_attributes attr = { .set = set, .propagation = propagation };
    return (int)syscall(NR_MOUNT_SETATTR, fd, "", AT_EMPTY_PATH | flags, &attr, sizeof attr);
}

static void open_source(const struct cursor *c)
{
    int n = slot("tree", c->argv[1]);
    const char *flags = c->argv[3];
    unsigned recursive = strstr(flags, "rec") ? TREE_RECURSIVE : 0;
    uint64_t set = ATTR_NOSUID | (strstr(flags, "dev") ? ATTR_NOEXEC : ATTR_NODEV) |
                   (strstr(flags, "ro") ? ATTR_RDONLY : 0);
    slots[n] = (int)check(syscall(NR_OPEN_TREE, AT_FDCWD, c->argv[2], TREE_CLONE | TREE_CLOEXEC | recursive),
                          "tree", c->argv[2]);
    /* Private: what the host mounts there later does not appear inside. */
    check(set_attributes(slots[n], recursive, set, MS_PRIVATE), "tree-attributes", c->argv[2]);
}

/* A place in the new root, found without leaving it whatever symlinks the image holds. */
static int at_root(const char *step, const char *path, int missing_is_fine)
{
    struct open_request how = { .flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_AS_ROOT | RESOLVE_MAGICLINKS_NOT };
    int fd = (int)syscall(NR_OPENAT2, root_fd, path, &how, sizeof how);
    if (fd < 0 && !(missing_is_fine && (errno == ENOENT || errno == ENOTDIR)))
        fail(step, path);
    return fd;
}

static void attach(const char *step, int mount_fd, const char *path)
{
    int target = at_root(step, path, 0);
    check(syscall(NR_MOVE_MOUNT, mount_fd, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), step, path);
    close(target);
    close(mount_fd);
}

static int new_filesystem(const char *type, char *options, unsigned attributes)
{
    int fs = (int)check(syscall(NR_FSOPEN, type, 1), "fsopen", type);
    for (char *save = NULL, *option = strtok_r(options, ",", &save); option; option = strtok_r(NULL, ",", &save)) {
        char *value = strchr(option, '=');
        if (value != NULL)
            *value++ = 0;
        check(syscall(NR_FSCONFIG, fs, value ? CONF_STRING : CONF_FLAG, option, value, 0), type, option);
    }
    check(syscall(NR_FSCONFIG, fs, CONF_CREATE, NULL, NULL, 0), type, "create");
    int fd = (int)check(syscall(NR_FSMOUNT, fs, 1, attributes), type, "mount");
    close(fs);
    return fd;
}

/* The whole mount goes to the place first, because only what is mounted can be copied from; a copy of its
 * subdirectory then covers it for good. */
static void attach_below(int mount_fd, const char *path, const char *subdirectory)
{
    int target = at_root("volume", path, 0);
    check(syscall(NR_MOVE_MOUNT, mount_fd, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "volume", path);
    int copy = (int)check(syscall(NR_OPEN_TREE, mount_fd, subdirectory, TREE_CLONE | TREE_CLOEXEC), "volume", subdirectory);
    check(syscall(NR_MOVE_MOUNT, copy, "", mount_fd, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "volume", path);
    close(copy);
    close(mount_fd);
    close(target);
}

/* It covers a directory that every host has, in this mount namespace alone. Whatever is needed of the host's /proc and
 * /dev was opened before. */
static void stage(void)
{
    char options[] = "size=4k,nr_inodes=8,mode=0555";
    stage_fd = root_fd = new_filesystem("tmpfs", options, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC);
    check(syscall(NR_MOVE_MOUNT, root_fd, "", AT_FDCWD, "/proc", MOVE_F_EMPTY), "stage", "");
    check(mkdirat(root_fd, "root", 0555), "stage", "root");
    check(mkdirat(root_fd, "empty", 0555), "stage", "empty");
}

static void new_root(const struct cursor *c)
{
    root_fd = slots[slot("newroot", c->argv[1])];
    check(syscall(NR_MOVE_MOUNT, root_fd, "", stage_fd, "root", MOVE_F_EMPTY), "newroot", c->argv[1]);
}

static void move(const char *path)
{
    int target = at_root("move", path, 0);
    check(syscall(NR_MOVE_MOUNT, stage_fd, path, target, "", MOVE_T_EMPTY), "move", path);
    close(target);
}

/* Files that several environments see, the host's among them, are the same to the kernel wherever they are seen: who
 * watches or locks one learns of all who use it, and holds them up. An overlay gives them another identity, at the
 * cost of a mount. Where the kernel cannot make one (before 5.11, or stacked too deep) they stay what they are. */
static void make_own(const char *path)
{
    char lower[PATH_MAX];
    snprintf(lower, sizeof lower, "%s/root/%s:%s/empty", stage_path, path, stage_path); /* it takes two layers */
    int fs = (int)syscall(NR_FSOPEN, "overlay", 1), fd = -1;
    if (fs >= 0 && syscall(NR_FSCONFIG, fs, CONF_STRING, "lowerdir", lower, 0) == 0 &&
        syscall(NR_FSCONFIG, fs, CONF_CREATE, NULL, NULL, 0) == 0)
        fd = (int)syscall(NR_FSMOUNT, fs, 1, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    if (fd < 0)
        complain('W', "own", path);
    if (fs >= 0)
        close(fs);
    if (fd < 0)
        return;
    if (strcmp(path, ".") != 0) {
        attach("own", fd, path);
        return;
    }
    check(syscall(NR_MOVE_MOUNT, fd, "", stage_fd, "root", MOVE_F_EMPTY), "own", path);
    close(root_fd);
    root_fd = fd;
}

/* Files are covered by /dev/null, directories by one empty file system that all of them share. */
static void mask(const char *path)
{
    static int nothing = -1;
    int target = at_root("mask", path, 1), cover;
    if (target < 0)
        return;
    struct stat st;
    check(fstat(target, &st), "mask", path);
    bool first = S_ISDIR(st.st_mode) && nothing < 0;
    if (first) {
        char options[] = "size=4k,nr_inodes=2,mode=0555";
        cover = new_filesystem("tmpfs", options, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC);
        nothing = cover; /* once it is mounted, it can be copied from */
    } else if (S_ISDIR(st.st_mode)) {
        cover = (int)check(syscall(NR_OPEN_TREE, nothing, "", TREE_CLONE | TREE_CLOEXEC | AT_EMPTY_PATH), "mask", path);
    } else {
        cover = (int)check(syscall(NR_OPEN_TREE, root_fd, "dev/null", TREE_CLONE | TREE_CLOEXEC), "mask", path);
    }
    check(syscall(NR_MOVE_MOUNT, cover, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "mask", path);
    if (!first)
        close(cover);
    close(target);
}

static void make_readonly(const char *path)
{
    int target = at_root("readonly", path, 1);
    if (target < 0)
        return;
    int copy = (int)check(syscall(NR_OPEN_TREE, target, "", TREE_CLONE | TREE_CLOEXEC | AT_EMPTY_PATH), "readonly", path);
    check(set_attributes(copy, 0, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, 0), "readonly", path);
    check(syscall(NR_MOVE_MOUNT, copy, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "readonly", path);
    close(copy);
    close(target);
}

static void set_sysctl(const char *name, const char *value)
{
    char path[128];
    snprintf(path, sizeof path, "proc/sys/%s", name);
    struct open_request how = { .flags = O_WRONLY | O_CLOEXEC, .resolve = RESOLVE_AS_ROOT | RESOLVE_MAGICLINKS_NOT };
    int fd = (int)syscall(NR_OPENAT2, root_fd, path, &how, sizeof how);
    if (fd < 0 && errno == ENOENT)
        return;
    check(fd, "sysctl", name);
    check(write(fd, value, strlen(value)), "sysctl", name);
    close(fd);
}

static void seal(const char *path)
{
    int fd = at_root("seal", path, 0);
    check(set_attributes(fd, 0, ATTR_RDONLY, 0), "seal", path);
    close(fd);
}

/* The directory of `path` in the new root, and its last name. */
static int parent_at_root(const char *step, char *path, const char **name)
{
    char *slash = strrchr(path, '/');
    *name = slash ? slash + 1 : path;
    if (slash == NULL)
        return at_root(step, ".", 0);
    *slash = 0;
    int fd = at_root(step, path, 0);
    *slash = '/';
    return fd;
}

static void make(const char *step, char *path, const char *argument)
{
    const char *name;
    int parent = parent_at_root(step, path, &name);
    if (strcmp(step, "dir") == 0) {
        check(mkdirat(parent, name, (mode_t)number(step, argument)), step, path);
    } else if (strcmp(step, "symlink") == 0) {
        check(symlinkat(argument, parent, name), step, path);
    } else {
        int fd = (int)check(openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644), step, path);
        size_t len = strlen(argument);
        if (len != 0 && write(fd, argument, len) != (ssize_t)len)
            fail(step, path);
        close(fd);
    }
    close(parent);
}

static void close_roots(void)
{
    close(root_fd);
    close(stage_fd);
    root_fd = stage_fd = -1;
}

static void pivot(void)
{
    check(fchdir(root_fd), "pivot", "fchdir");
    check(syscall(SYS_pivot_root, ".", "."), "pivot", "pivot_root");
    check(umount2(".", MNT_DETACH), "pivot", "umount");
    check(chdir("/"), "pivot", "chdir");
    if (root_fd == stage_fd)
        stage_path = "";
    else
        close_roots();
}

/* The new root covers the stage. To unmount that, or to pivot again, would take the kernel longer than all other steps
 * together, and there is nothing in it that anybody could find. */
static void enter(void)
{
    check(fchdir(root_fd), "enter", "fchdir");
    check(syscall(NR_MOVE_MOUNT, root_fd, "", AT_FDCWD, "/", MOVE_F_EMPTY), "enter", "move");
    check(chroot("."), "enter", "chroot");
    check(chdir("/"), "enter", "chdir");
    close_roots();
}

/* ---- small steps ---- */

/* The kernel asks who opened the file, so the launcher does; it moves who writes to it, so that is us. Writing
 * "0" to `tasks` moves one thread, which unlike any other move takes no lock that stops all forks. */
static void join(void)
{
    for (size_t i = 0; i < tasks_count; i++) {
        check(write(tasks[i], "0", 1), "join", "");
        close(tasks[i]);
    }
    /* Only now, so that the new cgroup is the root of what is seen inside. */
    check(unshare(CLONE_NEWCGROUP), "join", "cgroup namespace");
}

static void loopback(void)
{
    struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP };
    int fd = (int)check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "loopback", "socket");
    check(ioctl(fd, SIOCSIFFLAGS, &request), "loopback", "up");
    close(fd);
}

static void limit(const struct cursor *c)
{
    check(sk_cap_limit((int)number("rlimit", c->argv[1]), (rlim_t)number("rlimit", c->argv[2])), "rlimit", c->argv[1]);
}

static void set_capabilities(uint32_t keep)
{
    struct capability_header header = { .version = CAPABILITY_VERSION };
    struct capability_data data[2] = { { .effective = keep, .permitted = keep } };
    check(syscall(SYS_capset, &header, data), "drop", "capset");
}

static void bound(void)
{
    for (int cap = 0; cap <= 63; cap++)
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EINVAL)
            fail("bound", "bounding set");
    /* Nothing that runs from now on gains or loses capabilities by being or becoming root. */
    check(prctl(PR_SET_SECUREBITS, SECUREBITS_NOTHING, 0, 0, 0), "bound", "securebits");
}

static void drop(const struct cursor *c)
{
    uid_t uid = (uid_t)number("drop", c->argv[1]);
    gid_t gid = (gid_t)number("drop", c->argv[2]);
    if (rootful)
        check(setgroups(0, NULL), "drop", "setgroups");
    check(setresgid(gid, gid, gid), "drop", "setresgid");
    check(setresuid(uid, uid, uid), "drop", "setresuid");
    set_capabilities((uint32_t)number("drop", c->argv[3]));
}

static void allow(const struct cursor *c)
{
    errno = E2BIG;
    if (allowed_count == ALLOW_MAX)
        fail("allow", c->argv[1]);
    allowed[allowed_count].path = c->argv[1];
    allowed[allowed_count++].writable = strcmp(c->argv[2], "rw") == 0;
}

/* ---- Landlock and seccomp ---- */

static void landlock(void)
{
    int abi = (int)syscall(NR_LANDLOCK_CREATE, NULL, 0, LANDLOCK_ASK_VERSION);
    if (abi < 1)
        return; /* defence in depth where the kernel has it; what is enforced is read back and reported */
    const uint64_t read_bits = (1u << 0) | (1u << 2) | (1u << 3); /* execute, read file, read directory */
    uint64_t all = (1u << 13) - 1;
    if (abi >= 2)
        all |= 1u << 13; /* refer */
    if (abi >= 3)
        all |= 1u << 14; /* truncate */
    if (abi >= 5)
        all |= 1u << 15; /* ioctl on devices */
    const uint64_t directory_bits = all & ~((1u << 0) | (1u << 1) | (1u << 2) | (1u << 14) | (1u << 15));
    struct landlock_attributes attr = { .fs = all, .scoped = abi >= 6 ? 3 : 0 };
    size_t size = abi >= 6 ? sizeof attr : abi >= 4 ? 16 : 8;
    int ruleset = (int)check(syscall(NR_LANDLOCK_CREATE, &attr, size, 0u), "landlock", "create");
    for (size_t i = 0; i < allowed_count; i++) {
        struct stat st;
        int fd = open(allowed[i].path, O_PATH | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            continue;
        check(fd, "landlock", allowed[i].path);
        check(fstat(fd, &st), "landlock", allowed[i].path);
        struct landlock_rule rule = { .access = allowed[i].writable ? all : read_bits, .parent = fd };
        if (!S_ISDIR(st.st_mode))
            rule.access &= ~directory_bits;
        check(syscall(NR_LANDLOCK_ADD, ruleset, LANDLOCK_BENEATH, &rule, 0u), "landlock", allowed[i].path);
        close(fd);
    }
    check(syscall(NR_LANDLOCK_RESTRICT, ruleset, 0u), "landlock", "restrict");
    close(ruleset);
}

static void confine(int seccomp_fd)
{
    static struct filter_instruction filter[4096];
    struct filter_program program = { .filter = filter };
    check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "confine", "no_new_privs");
    landlock();
    /* From its start, whatever another launch that shares the descriptor has read of it. */
    ssize_t n = pread(seccomp_fd, filter, sizeof filter, 0);
    errno = n < 0 ? errno : EINVAL;
    if (n <= 0 || (size_t)n % sizeof filter[0] != 0)
        fail("seccomp", "program");
    program.len = (unsigned short)((size_t)n / sizeof filter[0]);
    check(syscall(SYS_seccomp, SECCOMP_INSTALL, 0, &program), "seccomp", "install");
}

/* ---- the new process ---- */

static rlim_t guest_limit(const char *text)
{
    return strcmp(text, "-") == 0 ? RLIM_INFINITY : (rlim_t)number("guest", text);
}

static void configure_guest(const struct cursor *c)
{
    sk_config = (struct sk_guest_config){ .listen_fd = 3 };
    for (int i = 1; i < c->argc; i++) {
        char *value = strchr(c->argv[i], '=');
        errno = EINVAL;
        if (value == NULL)
            fail("guest", c->argv[i]);
        *value++ = 0;
        const char *key = c->argv[i];
        if (strcmp(key, "workspace") == 0)
            sk_config.workspace = value;
        else if (strcmp(key, "tmp") == 0)
            sk_config.tmp = value;
        else if (strcmp(key, "run") == 0)
            sk_config.run = value;
        else if (strcmp(key, "uid") == 0)
            sk_config.uid = (uid_t)number("guest", value);
        else if (strcmp(key, "gid") == 0)
            sk_config.gid = (gid_t)number("guest", value);
        else if (strcmp(key, "switch") == 0)
            sk_config.switch_users = *value == '1';
        else if (strcmp(key, "fds") == 0)
            sk_config.fds = guest_limit(value);
        else if (strcmp(key, "processes") == 0)
            sk_config.processes = guest_limit(value);
        else if (strcmp(key, "data") == 0)
            sk_config.data = guest_limit(value);
        else if (strcmp(key, "file_size") == 0)
            sk_config.file_size = guest_limit(value);
        else if (strcmp(key, "orphan_ms") == 0)
            sk_config.orphan_ms = (uint64_t)number("guest", value);
        else
            fail("guest", key);
    }
    sk_roots.workspace_path = sk_config.workspace;
    sk_roots.tmp_path = sk_config.tmp;
    const int flags = O_PATH | O_DIRECTORY | O_CLOEXEC;
    sk_roots.workspace_fd = (int)check(open(sk_config.workspace, flags), "guest", sk_config.workspace);
    sk_roots.tmp_fd = (int)check(open(sk_config.tmp, flags), "guest", sk_config.tmp);
    check(chdir(sk_config.workspace), "guest", "workspace");
}

static void execute(struct cursor *c)
{
    if (is(c, "join", 0))
        join();
    else if (is(c, "tree", 3))
        open_source(c);
    else if (is(c, "stage", 0))
        stage();
    else if (is(c, "newroot", 1))
        new_root(c);
    else if (is(c, "move", 1))
        move(c->argv[1]);
    else if (is(c, "own", 1))
        make_own(c->argv[1]);
    else if (is(c, "dir", 2) || is(c, "symlink", 2) || is(c, "file", 2))
        make(c->argv[0], c->argv[1], c->argv[2]);
    else if (is(c, "place", 2))
        attach("place", slots[slot("place", c->argv[1])], c->argv[2]);
    else if (is(c, "volume", 3))
        attach_below(slots[slot("volume", c->argv[1])], c->argv[2], c->argv[3]);
    else if (is(c, "tmpfs", 3))
        attach("tmpfs",
               new_filesystem("tmpfs", c->argv[2],
                              ATTR_NOSUID | ATTR_NODEV | (strstr(c->argv[3], "noexec") ? ATTR_NOEXEC : 0)),
               c->argv[1]);
    else if (is(c, "proc", 1)) {
        char none[1] = "";
        attach("proc", new_filesystem("proc", none, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC), c->argv[1]);
    } else if (is(c, "devpts", 2)) {
        char options[64];
        snprintf(options, sizeof options, "newinstance,ptmxmode=0666,mode=0620,max=%s", c->argv[2]);
        attach("devpts", new_filesystem("devpts", options, ATTR_NOSUID | ATTR_NOEXEC), c->argv[1]);
    } else if (is(c, "sysctl", 2))
        set_sysctl(c->argv[1], c->argv[2]);
    else if (is(c, "mask", 1))
        mask(c->argv[1]);
    else if (is(c, "readonly", 1))
        make_readonly(c->argv[1]);
    else if (is(c, "seal", 1))
        seal(c->argv[1]);
    else if (is(c, "pivot", 0))
        pivot();
    else if (is(c, "enter", 0))
        enter();
    else if (is(c, "hostname", 1))
        check(sethostname(c->argv[1], strlen(c->argv[1])), "hostname", c->argv[1]);
    else if (is(c, "loopback", 0))
        loopback();
    else if (is(c, "rlimit", 2))
        limit(c);
    else if (is(c, "bound", 0))
        bound();
    else if (is(c, "drop", 3))
        drop(c);
    else if (is(c, "allow", 2))
        allow(c);
    else if (is(c, "confine", 1))
        confine(slots[slot("confine", c->argv[1])]);
    else if (strcmp(c->argv[0], "guest") == 0)
        configure_guest(c);
    else if (strcmp(c->argv[0], "mode") != 0 && strcmp(c->argv[0], "map") != 0 &&
               strcmp(c->argv[0], "owner") != 0 && strcmp(c->argv[0], "cgroup") != 0 && strcmp(c->argv[0], "tasks") != 0) {
        errno = EINVAL;
        fail("unknown-step", c->argv[0]);
    }
}

static void run_steps(void)
{
    struct cursor c = { 0 };
    while (next_step(&c))
        execute(&c);
}

/* Out of the way of the numbers that descriptors get in the end. */
static int raise_fd(int fd, const char *what)
{
    return (int)check(fcntl(fd, F_DUPFD_CLOEXEC, 200), "descriptors", what);
}

static _Noreturn void become_guest(void)
{
    if (setsid() < 0 && !bare)
        fail("setsid", "");
    /* The session keyring of whoever started the daemon does not come along. */
    syscall(SYS_keyctl, 1 /* join a new session keyring */, NULL);
    /* Nothing goes out to the host's mounts. What the host unmounts while this one waits for its steps must not be
     * held by it, so unmounts do come in. */
    if (!bare)
        check(mount(NULL, "/", NULL, MS_REC | MS_SLAVE, NULL), "own-mounts", "/");
    run_steps();
    while (sk_config.workspace == NULL) {
        say("B");
        receive();
        run_steps();
    }
    /* From here on: 0 to 2 are /dev/null, 3 is the listening socket, 4 and 5 the roots, 6 the daemon for a last word. */
    int null = (int)check(open("/dev/null", O_RDWR), "descriptors", "/dev/null");
    null = raise_fd(null, "null");
    int workspace = raise_fd(sk_roots.workspace_fd, "workspace"), tmp = raise_fd(sk_roots.tmp_fd, "tmp");
    control_fd = raise_fd(control_fd, "control");
    for (int fd = 0; fd < 3; fd++)
        check(dup2(null, fd), "descriptors", "dup2");
    check(dup3(workspace, 4, O_CLOEXEC), "descriptors", "dup3");
    check(dup3(tmp, 5, O_CLOEXEC), "descriptors", "dup3");
    check(dup3(control_fd, 6, O_CLOEXEC), "descriptors", "dup3");
    control_fd = 6;
    check(fcntl(3, F_SETFD, FD_CLOEXEC), "descriptors", "listening socket");
    check(syscall(NR_CLOSE_RANGE, 7u, ~0u, 0), "descriptors", "close_range");
    sk_roots.workspace_fd = 4;
    sk_roots.tmp_fd = 5;
    /* No process inside, of whatever user, may look into this one. */
    check(prctl(PR_SET_DUMPABLE, 0, 0, 0, 0), "dumpable", "");
    prctl(PR_SET_NAME, "skerry-init", 0, 0, 0);
    say("R");
    char last;
    if (recv(control_fd, &last, 1, 0) != 1)
        _exit(1);
    close(control_fd);
    _exit(sk_guest_main());
}

/* ---- the launching process ---- */

static void write_map(pid_t pid, const char *file, const char *content)
{
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/%s", (int)pid, file);
    int fd = (int)check(open(path, O_WRONLY | O_CLOEXEC), "map", file);
    size_t len = strlen(content);
    if (write(fd, content, len) != (ssize_t)len)
        fail("map", file);
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
    check(prctl(PR_SET_SECUREBITS, SECUREBIT_NO_SETUID_FIXUP, 0, 0, 0), "owner", "securebits");
    check(setresuid((uid_t)owner, (uid_t)owner, (uid_t)owner), "owner", "setresuid");
}

/* A daemon that the kernel shall spare has a negative score, which is not for what it starts. Written with root's
 * capabilities it is also the least to which anybody inside can set it. */
static void reset_oom_score(void)
{
    char score[16] = "";
    int fd = (int)check(open("/proc/self/oom_score_adj", O_RDWR | O_CLOEXEC), "oom-score", "open");
    check(read(fd, score, sizeof score - 1), "oom-score", "read");
    if (*score == '-')
        strcpy(score, "0");
    check(write(fd, score, strlen(score)), "oom-score", "write");
    close(fd);
}

int sk_launch_main(void)
{
    struct cursor c = { 0 };
    char *uids = NULL, *gids = NULL, *cgroup = NULL;
    int sync[2];
    char go;

    umask(022);
    default_signals();
    signal(SIGPIPE, SIG_IGN);
    check(fcntl(control_fd, F_SETFD, FD_CLOEXEC), "control", "");
    check(chdir("/"), "chdir", "/");
    receive();
    while (next_step(&c)) {
        if (is(&c, "mode", 1)) {
            rootful = strcmp(c.argv[1], "rootful") == 0;
            bare = strcmp(c.argv[1], "bare") == 0;
        } else if (is(&c, "map", 2)) {
            uids = c.argv[1];
            gids = c.argv[2];
        } else if (is(&c, "owner", 1)) {
            owner = number("owner", c.argv[1]);
        } else if (is(&c, "cgroup", 1)) {
            cgroup = c.argv[1];
        } else if (is(&c, "tasks", 1)) {
            errno = E2BIG;
            if (tasks_count == TASKS_MAX)
                fail("tasks", c.argv[1]);
            tasks[tasks_count++] = (int)check(open(c.argv[1], O_WRONLY | O_CLOEXEC), "tasks", c.argv[1]);
        }
    }
    char started[32];
    if (bare) {
        snprintf(started, sizeof started, "P%d", (int)getpid());
        say(started);
        check(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "subreaper", "");
        become_guest();
    }
    errno = EINVAL;
    if (uids == NULL)
        fail("map", "missing");
    check(pipe2(sync, O_CLOEXEC), "pipe", "");
    struct clone_request args = { .flags = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC |
                                         CLONE_NEWUTS | CLONE_PARENT };
    if (cgroup != NULL) {
        args.flags |= INTO_CGROUP;
        args.cgroup = (uint64_t)check(open(cgroup, O_PATH | O_DIRECTORY | O_CLOEXEC), "cgroup", cgroup);
    }
    reset_oom_score();
    if (owner >= 0)
        become_owner();
    long pid = syscall(NR_CLONE3, &args, sizeof args);
    check(pid, "namespaces", cgroup ? cgroup : "");
    if (pid == 0) {
        close(sync[1]);
        /* EOF: the parent failed, and has said so. */
        if (read(sync[0], &go, 1) != 1)
            _exit(1);
        close(sync[0]);
        if (rootful) {
            check(setgroups(0, NULL), "users", "setgroups");
            check(setresgid(0, 0, 0), "users", "setresgid");
            check(setresuid(0, 0, 0), "users", "setresuid");
        }
        become_guest();
    }
    snprintf(started, sizeof started, "P%ld", pid);
    say(started);
    if (!rootful)
        write_map((pid_t)pid, "setgroups", "deny");
    write_map((pid_t)pid, "uid_map", uids);
    write_map((pid_t)pid, "gid_map", gids);
    check(write(sync[1], "g", 1), "go", "");
    return 0;
}
