/* Role boot: the first process of a virtual machine: see launch.c.
 *
 * It loads what drivers the machine needs, asks the host for steps over the serial port, and starts a second process
 * that executes them and becomes the guest, in a pid namespace of its own. It then passes connections on to the guest
 * (see wire.c) and ends the machine with it. What it finds in the initial RAM disk: /modules/00 and so on in the order
 * in which they are to be loaded, the same in /network for machines that have one, the seccomp programs in /profiles,
 * /resolv.conf, and empty directories to mount on. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"
#include "wire.h"

#define PORT "/dev/vport0p1"
#define GROUP "/cgroups/skerry"
#define LISTENS "/guest.sock"
enum { PORT_SECONDS = 20 };

static int answers = -1, ended = -1, memory_events = -1;
static uint64_t kills;
static pid_t guest;

static _Noreturn void power_off(void)
{
    sync();
    reboot(RB_AUTOBOOT); /* with which the monitor ends */
    _exit(1);
}

void sk_load_modules(const char *directory)
{
    char path[32];
    for (int number = 0; number < 100; number++) {
        snprintf(path, sizeof path, "%.20s/%02d", directory, number);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            return;
        if (syscall(SYS_finit_module, fd, "", 0) < 0 && errno != EEXIST)
            sk_fail("module", path);
        close(fd);
    }
}

/* Its driver makes it when the host has answered, of which nobody tells this process. */
static int open_port(void)
{
    const struct timespec pause = { .tv_nsec = 1000000 };
    uint64_t until = sk_now_ms() + PORT_SECONDS * 1000;
    int fd;
    while ((fd = open(PORT, O_RDWR | O_CLOEXEC)) < 0 && sk_now_ms() < until)
        nanosleep(&pause, NULL);
    return (int)sk_check(fd, "port", PORT);
}

static void make_group(void)
{
    sk_check(mount("none", "/cgroups", "cgroup2", MS_NOSUID | MS_NODEV | MS_NOEXEC, NULL), "cgroup2", "mount");
    sk_write("/cgroups/cgroup.subtree_control", "+memory +pids");
    sk_check(mkdir(GROUP, 0755), "cgroup2", GROUP);
    memory_events = (int)sk_check(open(GROUP "/memory.events", O_RDONLY | O_CLOEXEC), "cgroup2", "memory.events");
}

static void take_start(const struct sk_wire_start *start)
{
    struct {
        int bits, bytes;
        uint8_t seed[WIRE_SEED];
    } entropy = { .bits = WIRE_SEED * 8, .bytes = WIRE_SEED };
    struct timespec now = { .tv_sec = (time_t)(start->now / 1000000000u), .tv_nsec = (long)(start->now % 1000000000u) };
    sk_check(clock_settime(CLOCK_REALTIME, &now), "clock", "");
    memcpy(entropy.seed, start->seed, WIRE_SEED);
    int fd = (int)sk_check(open("/dev/urandom", O_RDWR | O_CLOEXEC), "entropy", "open");
    sk_check(ioctl(fd, RANDOM_ADD, &entropy), "entropy", "add");
    sk_check(ioctl(fd, RANDOM_RESEED), "entropy", "reseed");
    close(fd);
}

/* ---- while the guest runs ---- */

/* The guest's end of an execution must not come before the news that its process was killed for want of memory. */
static void tell_kills(void)
{
    char text[512];
    ssize_t n = pread(memory_events, text, sizeof text - 1, 0);
    if (n <= 0)
        return;
    text[n] = 0;
    const char *found = strstr(text, "oom_kill ");
    uint64_t now = found ? strtoull(found + 9, NULL, 10) : 0;
    uint8_t payload[8];
    if (now == kills)
        return;
    kills = now;
    sk_put64(payload, now);
    sk_wire_send(WIRE_OOM, 0, payload, sizeof payload);
}

static bool record(uint8_t kind, uint32_t serial, const uint8_t *payload, size_t len)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX, .sun_path = LISTENS };
    (void)payload;
    (void)len;
    if (kind != WIRE_OPEN)
        return false;
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0)
        return false;
    fcntl(fd, F_SETFL, O_NONBLOCK);
    sk_wire_connect(fd, serial);
    return true;
}

static bool answered(void)
{
    char line[512];
    ssize_t n = read(answers, line, sizeof line - 1);
    if (n <= 0) {
        close(answers);
        answers = -1;
        return true;
    }
    line[n] = 0;
    for (char *save = NULL, *one = strtok_r(line, "\n", &save); one != NULL; one = strtok_r(NULL, "\n", &save))
        sk_wire_send(WIRE_TELL, 0, one, strlen(one));
    return true;
}

static bool child_ended(void)
{
    struct signalfd_siginfo info;
    pid_t pid;
    while (read(ended, &info, sizeof info) == sizeof info)
        ;
    while ((pid = waitpid(-1, NULL, WNOHANG)) > 0)
        if (pid == guest)
            return false;
    return true;
}

static _Noreturn void become_guest(int answer_fd)
{
    sk_check(unshare(CLONE_NEWNS), "namespaces", "mount");
    sk_control_fd = answer_fd;
    _exit(sk_become_init());
}

int sk_boot_main(void)
{
    const uint8_t *start;
    int pipe_fds[2];
    umask(022);
    signal(SIGPIPE, SIG_IGN);
    sk_answer_lines(STDOUT_FILENO); /* the console */
    sk_check(mount("dev", "/dev", "devtmpfs", MS_NOSUID, NULL), "devtmpfs", "mount");
    sk_load_modules("/modules");
    sk_wire_open(open_port());
    sk_wire_send(WIRE_HELLO, 0, NULL, 0);
    size_t len = sk_wire_await(WIRE_STEPS, &start);
    errno = EPROTO;
    if (len < sizeof(struct sk_wire_start))
        sk_fail("wire", "too short");
    struct sk_wire_start given;
    memcpy(&given, start, sizeof given);
    take_start(&given);
    sk_load_steps(start + sizeof given, len - sizeof given);
    make_group();
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGCHLD);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    ended = (int)sk_check(signalfd(-1, &signals, SFD_CLOEXEC | SFD_NONBLOCK), "signalfd", "");
    sk_check(pipe2(pipe_fds, O_CLOEXEC), "pipe", "");
    sk_check(unshare(CLONE_NEWPID), "namespaces", "pid");
    guest = (pid_t)sk_check(fork(), "fork", "");
    if (guest == 0)
        become_guest(pipe_fds[1]);
    close(pipe_fds[1]);
    answers = pipe_fds[0];
    const struct sk_wire_side side = { .record = record,
                                       .before_data = tell_kills,
                                       .other = { { &answers, answered, false }, { &ended, child_ended, false } } };
    sk_wire_run(&side);
    if (answers >= 0)
        answered(); /* the reason, if there is one */
    sk_wire_flush();
    power_off();
}
