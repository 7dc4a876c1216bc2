/* Skerry's native helper: one static binary, PID 1 of every environment.
 *
 * Theory of operation
 *
 *   daemon ──spawn──> launch ──clone3──> init (PID 1 inside) ──fork──> supervisor ──vfork──> workload
 *                       │                  │  ▲                           │  ▲
 *                       └── maps, then     │  └── reports through a pipe ─┘  └── everything that it starts
 *                           exits          │                                   stays below the supervisor,
 *                                          └── one stream socket to the        which is a child subreaper
 *                                              daemon: the guest protocol
 *
 * launch.c  reads a list of steps from a file descriptor and executes them: namespaces, mounts, limits,
 *           users, Landlock, seccomp. It holds no policy; the list is the policy. The process that has
 *           executed all steps *becomes* the guest, without another exec.
 *           steps.c reads the list; mounts.c and privileges.c execute what their names say.
 * machine.c runs a virtual machine in an environment and boot.c is the first process in the machine; the stream between
 *           them is that of wire.c.
 * network.c prepares, from outside, the network of an environment that runs: routes, redirections, sockets.
 * relay.c   copies between its stdio and a guest's socket, for a daemon that only a container engine connects to it.
 * guest.c   the event loop: accepts the daemon's connection (a new one replaces the old one, so that a
 *           restarted daemon finds its environments again, and without root gets their network from here), decodes
 *           frames, dispatches.
 * start.c   starts an execution: its pipes or its terminal, and its supervisor.
 * profile.c puts the execution profile of one command on it: Landlock and seccomp.
 * supervisor.c what happens between fork and exec, and who waits for what an execution started.
 * process.c what is known of each execution: its end, what the host may see of it, reaping.
 * streams.c moves its bytes, under flow control.
 * kill.c    signals and kills its tree, which tree.c reads from /proc.
 * shell.c   stateful shells: a shell forks for every command, and the fork that ran the command to its end
 *           becomes the shell.
 * files.c   short file operations; handles.c those of many frames, for which a file stays open.
 * applets.c long ones, which run as executions: applet_walk.c (list, remove), applet_watch.c, tar_read.c, tar_write.c.
 * paths.c   resolves callers' paths without ever leaving the workspace or /tmp.
 *
 * The guest runs as the workload's own user, keeps at most three capabilities inside its user namespace (to
 * switch users and to signal them), cannot be dumped or traced, and is immune to signals from inside, being
 * PID 1. It is not trusted by the daemon: whoever takes it over gains nothing outside of the environment.
 *
 * The binary runs from a sealed memfd, so /proc/self/exe leads to nothing that could be overwritten.
 */
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "skerry.h"

/* The time stamp counter and the clock at one moment: of several tries the one that was interrupted least. */
static void look_at_clocks(uint64_t *ticks, uint64_t *ns)
{
#ifdef __x86_64__
    uint64_t least = UINT64_MAX;
    for (int i = 0; i < 32; i++) {
        struct timespec now;
        uint64_t before = __builtin_ia32_rdtsc();
        clock_gettime(CLOCK_MONOTONIC_RAW, &now);
        uint64_t after = __builtin_ia32_rdtsc();
        if (after - before < least) {
            least = after - before;
            *ticks = before + least / 2;
            *ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
        }
    }
#else
    *ticks = *ns = 0;
#endif
}

/* Ticks in a millisecond: an emulated machine has the host's counter, and no way to find out how fast it is. */
static int tell_tick_rate(void)
{
    const struct timespec pause = { .tv_nsec = 50000000 };
    uint64_t ticks[2] = { 0 }, ns[2] = { 0 };
    look_at_clocks(&ticks[0], &ns[0]);
    nanosleep(&pause, NULL);
    look_at_clocks(&ticks[1], &ns[1]);
    if (ns[1] == ns[0])
        return 1;
    return printf("%llu\n", (unsigned long long)((ticks[1] - ticks[0]) * 1000000u / (ns[1] - ns[0]))) < 0;
}

int main(int argc, char **argv)
{
    if (argc == 2 && strcmp(argv[1], "launch") == 0)
        return sk_launch_main();
    if (argc > 2 && strcmp(argv[1], "init") == 0)
        return sk_init_main(argc - 2, argv + 2);
    if (argc == 2 && strcmp(argv[1], "boot") == 0)
        return sk_boot_main();
    if (argc == 2 && strcmp(argv[1], "network") == 0)
        return sk_network_main();
    if (argc == 3 && strcmp(argv[1], "relay") == 0)
        return sk_relay_main(argv[2]);
    if (argc == 2 && strcmp(argv[1], "ticks") == 0)
        return tell_tick_rate();
    if (argc == 2 && strcmp(argv[1], "version") == 0)
        return printf("%d\n", SK_PROTOCOL_VERSION) < 0;
    fputs("skerry-guest is started by the Skerry daemon; see `skerry --help`\n", stderr);
    return 2;
}
