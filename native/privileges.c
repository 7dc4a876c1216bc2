/* Steps that give an environment its limits and take its privileges: see launch.c. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <net/route.h>
#include <netinet/in.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kernel.h"
#include "launch.h"

enum { ALLOW_MAX = 32, TASKS_MAX = 16 };

static struct {
    char *path;
    bool writable;
} allowed[ALLOW_MAX];
static size_t allowed_count;
static int tasks[TASKS_MAX];
static size_t tasks_count;

void sk_join_later(const char *path)
{
    errno = E2BIG;
    if (tasks_count == TASKS_MAX)
        sk_fail("tasks", path);
    tasks[tasks_count++] = (int)sk_check(open(path, O_WRONLY | O_CLOEXEC), "tasks", path);
}

/* The kernel asks who opened the file, so the launcher does; it moves who writes to it, so that is us. Writing
 * "0" to `tasks` moves one thread, which unlike any other move takes no lock that stops all forks. */
static void join(void)
{
    for (size_t i = 0; i < tasks_count; i++) {
        sk_check(write(tasks[i], "0", 1), "join", "");
        close(tasks[i]);
    }
    /* Only now, so that the new cgroup is the root of what is seen inside. */
    sk_check(unshare(CLONE_NEWCGROUP), "join", "cgroup namespace");
}

static void loopback(void)
{
    struct ifreq request = { .ifr_name = "lo", .ifr_flags = IFF_UP };
    int fd = (int)sk_check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "loopback", "socket");
    sk_check(ioctl(fd, SIOCSIFFLAGS, &request), "loopback", "up");
    close(fd);
}

static struct ifreq with_address(const char *name, in_addr_t address)
{
    struct ifreq device = { 0 };
    const struct sockaddr_in value = { .sin_family = AF_INET, .sin_addr.s_addr = address };
    strncpy(device.ifr_name, name, sizeof device.ifr_name - 1);
    memcpy(&device.ifr_addr, &value, sizeof value);
    return device;
}

/* With routes to everywhere. The other end has the same hardware address, which is the one that a device without ARP
 * sends to. */
static void interface(char *name, const char *four, const char *six)
{
    struct ifreq own = with_address(name, inet_addr(four)), mask = with_address(name, INADDR_NONE);
    struct ifreq up = { .ifr_flags = IFF_UP | IFF_NOARP };
    struct rtentry route = { .rt_flags = RTF_UP, .rt_dev = name };
    struct interface_address address = { .prefix = 128, .index = (int)if_nametoindex(name) };
    struct interface_route anywhere = { .flags = RTF_UP, .metric = 1, .index = address.index };
    const struct sockaddr_in all = { .sin_family = AF_INET };
    errno = EINVAL;
    if (inet_pton(AF_INET6, six, &address.address) != 1)
        sk_fail("interface", six);
    strncpy(up.ifr_name, name, sizeof up.ifr_name - 1);
    int fd = (int)sk_check(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), "interface", "socket");
    sk_check(ioctl(fd, SIOCSIFADDR, &own), "interface", four);
    sk_check(ioctl(fd, SIOCSIFNETMASK, &mask), "interface", "IPv4 mask");
    sk_check(ioctl(fd, SIOCSIFFLAGS, &up), "interface", "up");
    memcpy(&route.rt_dst, &all, sizeof all);
    memcpy(&route.rt_genmask, &all, sizeof all);
    sk_check(ioctl(fd, SIOCADDRT, &route), "interface", "IPv4 route");
    close(fd);
    fd = socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return; /* a kernel without IPv6 */
    sk_check(ioctl(fd, SIOCSIFADDR, &address), "interface", six);
    sk_check(ioctl(fd, SIOCADDRT, &anywhere), "interface", "IPv6 route");
    close(fd);
}

static void limit(const struct sk_cursor *c)
{
    sk_check(sk_cap_limit((int)sk_number("rlimit", c->argv[1]), (rlim_t)sk_number("rlimit", c->argv[2])), "rlimit", c->argv[1]);
}

static void set_capabilities(uint32_t keep)
{
    struct capability_header header = { .version = CAPABILITY_VERSION };
    struct capability_data data[2] = { { .effective = keep, .permitted = keep } };
    sk_check(syscall(SYS_capset, &header, data), "drop", "capset");
}

static void empty_bounding_set(void)
{
    for (int cap = 0; cap <= 63; cap++)
        if (prctl(PR_CAPBSET_DROP, cap, 0, 0, 0) < 0 && errno != EINVAL)
            sk_fail("bound", "bounding set");
}

static void bound(void)
{
    empty_bounding_set();
    /* Nothing that runs from now on gains or loses capabilities by being or becoming root. */
    sk_check(prctl(PR_SET_SECUREBITS, SECUREBITS_NOTHING, 0, 0, 0), "bound", "securebits");
}

static void drop(const struct sk_cursor *c, bool rootful)
{
    uid_t uid = (uid_t)sk_number("drop", c->argv[1]);
    gid_t gid = (gid_t)sk_number("drop", c->argv[2]);
    if (rootful)
        sk_check(setgroups(0, NULL), "drop", "setgroups");
    sk_check(setresgid(gid, gid, gid), "drop", "setresgid");
    prctl(PR_SET_KEEPCAPS, 1, 0, 0, 0); /* refused, and not needed, after `bound` */
    sk_check(setresuid(uid, uid, uid), "drop", "setresuid");
    set_capabilities((uint32_t)sk_number("drop", c->argv[3]));
}

/* Who may signal a process or read its memory is decided by its real and its saved id, files by the effective one. */
static void shield(const struct sk_cursor *c)
{
    uid_t uid = (uid_t)sk_number("shield", c->argv[1]);
    sk_check(setresuid(uid, (uid_t)-1, uid), "shield", "setresuid");
}

static void allow(const struct sk_cursor *c)
{
    errno = E2BIG;
    if (allowed_count == ALLOW_MAX)
        sk_fail("allow", c->argv[1]);
    allowed[allowed_count].path = c->argv[1];
    allowed[allowed_count++].writable = strcmp(c->argv[2], "rw") == 0;
}

/* The map is written by a child that stays behind: it takes the capabilities of the namespace that is left. */
static void separate_users(long count)
{
    char map[64], path[64], go;
    int sync[2], status;
    pid_t self = getpid();
    sk_check(pipe2(sync, O_CLOEXEC), "users", "pipe");
    pid_t pid = (pid_t)sk_check(fork(), "users", "fork");
    if (pid == 0) {
        close(sync[1]);
        if (read(sync[0], &go, 1) != 1)
            _exit(1);
        snprintf(map, sizeof map, "0 0 %ld", count);
        snprintf(path, sizeof path, "/proc/%d/uid_map", (int)self);
        sk_write(path, map);
        snprintf(path, sizeof path, "/proc/%d/gid_map", (int)self);
        sk_write(path, map);
        _exit(0);
    }
    close(sync[0]);
    sk_check(unshare(CLONE_NEWUSER), "users", "unshare");
    sk_check(write(sync[1], "g", 1), "users", "write");
    close(sync[1]);
    sk_check(waitpid(pid, &status, 0), "users", "wait");
    if (status != 0)
        _exit(1); /* it has said why */
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
    int ruleset = (int)sk_check(syscall(NR_LANDLOCK_CREATE, &attr, size, 0u), "landlock", "create");
    for (size_t i = 0; i < allowed_count; i++) {
        struct stat st;
        int fd = open(allowed[i].path, O_PATH | O_CLOEXEC);
        if (fd < 0 && errno == ENOENT)
            continue;
        sk_check(fd, "landlock", allowed[i].path);
        sk_check(fstat(fd, &st), "landlock", allowed[i].path);
        struct landlock_rule rule = { .access = allowed[i].writable ? all : read_bits, .parent = fd };
        if (!S_ISDIR(st.st_mode))
            rule.access &= ~directory_bits;
        sk_check(syscall(NR_LANDLOCK_ADD, ruleset, LANDLOCK_BENEATH, &rule, 0u), "landlock", allowed[i].path);
        close(fd);
    }
    sk_check(syscall(NR_LANDLOCK_RESTRICT, ruleset, 0u), "landlock", "restrict");
    close(ruleset);
}

static void confine(int seccomp_fd)
{
    static struct filter_instruction filter[4096];
    struct filter_program program = { .filter = filter };
    sk_check(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "confine", "no_new_privs");
    landlock();
    /* From its start, whatever another launch that shares the descriptor has read of it. */
    ssize_t n = pread(seccomp_fd, filter, sizeof filter, 0);
    errno = n < 0 ? errno : EINVAL;
    if (n <= 0 || (size_t)n % sizeof filter[0] != 0)
        sk_fail("seccomp", "program");
    program.len = (unsigned short)((size_t)n / sizeof filter[0]);
    bool asks = false;
    for (unsigned i = 0; i < program.len; i++)
        asks |= filter[i].code == SECCOMP_CODE_RETURN && filter[i].k == SECCOMP_ASK;
    long fd = sk_check(syscall(SYS_seccomp, SECCOMP_INSTALL, asks ? SECCOMP_WITH_LISTENER : 0u, &program), "seccomp", "install");
    sk_filters_fd = asks ? (int)fd : -1;
}

bool sk_privilege_step(const struct sk_cursor *c, bool rootful)
{
    if (sk_is_step(c, "join", 0))
        join();
    else if (sk_is_step(c, "hostname", 1))
        sk_check(sethostname(c->argv[1], strlen(c->argv[1])), "hostname", c->argv[1]);
    else if (sk_is_step(c, "loopback", 0))
        loopback();
    else if (sk_is_step(c, "interface", 3))
        interface(c->argv[1], c->argv[2], c->argv[3]);
    else if (sk_is_step(c, "rlimit", 2))
        limit(c);
    else if (sk_is_step(c, "bound", 0))
        bound();
    else if (sk_is_step(c, "bounding", 0))
        empty_bounding_set();
    else if (sk_is_step(c, "users", 1))
        separate_users(sk_number("users", c->argv[1]));
    else if (sk_is_step(c, "drop", 3))
        drop(c, rootful);
    else if (sk_is_step(c, "shield", 1))
        shield(c);
    else if (sk_is_step(c, "allow", 2))
        allow(c);
    else if (sk_is_step(c, "confine", 1))
        confine(sk_slots[sk_slot("confine", c->argv[1])]);
    else
        return false;
    return true;
}
