/* Signals and kills: they reach the whole tree of an execution, also what left its session or its parent. */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include "process.h"

#define CHASE_MS 2000    /* before a tree that keeps forking is ended by kill(-1) */
#define REPORT_MS 4000   /* for a shell or a supervisor, not waiting for a CPU, to report the end of what was killed */
#define STARVED_MS 25000 /* ... waiting or not; the host's limit is 40 s */

static struct sk_tree tree;

static void read_tree(struct sk_process *p)
{
    tree.count = 0;
    tree.dying = false;
    if (!sk_shell_tree(p, &tree) && p->supervisor != 0)
        sk_tree_read(&tree, p->supervisor, 0, NULL);
}

static void signal_tree(int signo)
{
    for (size_t i = 0; i < tree.count; i++)
        kill(tree.pids[i], signo);
}

/* Reads the tree until all that is in it is stopped: then nothing of it forks meanwhile.
 *
 * gVisor sends SIGHUP to an orphaned process group whenever a process of it ends while another is stopped, and so to
 * the shell of a command that is killed. There a kill takes parents before their children, so that none of them sees a
 * child die and goes on, and reads the tree again. */
static void stop_tree(struct sk_process *p)
{
    read_tree(p);
    for (size_t before = 0; tree.count > before && !sk_config.gvisor;) {
        before = tree.count;
        signal_tree(SIGSTOP);
        read_tree(p);
    }
}

void sk_process_signal(uint32_t id, int signo)
{
    struct sk_process *p = sk_process_find(id);
    if (p == NULL || p->exited || signo < 1 || signo > 64)
        return;
    if (p->pid > 0) {
        kill(-p->pid, signo);
    } else { /* a shell's command has no process group of its own */
        /* A fork that has said that it is done is the shell from now on, and not to be signaled. */
        stop_tree(p);
        sk_shell_listen(p);
        bool ended = sk_process_find(id) != p || p->exited;
        if (!ended)
            signal_tree(signo);
        if (ended || signo != SIGSTOP)
            signal_tree(SIGCONT);
    }
}

/* Stopped processes cannot fork, and keep their place under the process limit: once all that were found are
 * stopped and none is new, killing them one by one ends the tree. Returns true when nothing is left. */
static bool kill_tree(struct sk_process *p)
{
    stop_tree(p);
    p->outruns = sk_tree_outruns(&p->chase, &tree);
    if (tree.count == 0)
        return true;
    signal_tree(SIGKILL);
    return false;
}

static void finish_kill(struct sk_process *p)
{
    /* Still marked as being killed, so that its end does not free it yet. */
    if (!p->exited && !sk_shell_break(p))
        sk_process_exited(p, 128 + SIGKILL, SIGKILL, NULL);
    p->killing = false;
    sk_shell_detach(p);
    sk_send(SK_KILLED, p->id, NULL, 0);
}

void sk_process_kill(uint32_t id)
{
    struct sk_process *p = sk_process_find(id);
    if (p == NULL) {
        sk_send(SK_KILLED, id, NULL, 0);
        return;
    }
    if (!p->killing) {
        p->killing = true;
        p->since = sk_now_ms();
        p->idle_since = p->since;
        p->chase = (struct sk_chase){ 0 };
    }
    kill_tree(p);
    sk_tick(true);
}

/* The last report is awaited, so that the end is told as it was and a shell keeps its state; and the dead, which keep
 * their places under the process limit until then. */
static bool kill_settled(struct sk_process *p)
{
    uint64_t now = sk_now_ms();
    pid_t shell = sk_shell_pid(p);
    if (p->supervisor == 0 && p->exited && !tree.dying)
        return true;
    if (sk_waits_for_machine(shell != 0 ? shell : p->supervisor))
        p->idle_since = now;
    return now - p->idle_since > REPORT_MS || now - p->since > STARVED_MS;
}

static void continue_kill(struct sk_process *p)
{
    bool gone = kill_tree(p);
    /* This cannot be outrun, and spares nobody else either: so not for a tree that is only slow to die, on a busy
     * machine. */
    if (!gone && p->outruns && getpid() == 1 && sk_now_ms() - p->since > CHASE_MS)
        kill(-1, SIGKILL);
    if (gone && kill_settled(p))
        finish_kill(p);
}

size_t sk_kill_count(struct sk_process *p)
{
    read_tree(p);
    return tree.count;
}

/* Orphans come to us only when a supervisor was killed from inside: nothing vouches for them any more. */
void sk_kill_strays(void)
{
    sk_tree_read(&tree, getpid(), 0, NULL);
    for (size_t i = 0; i < tree.count; i++) {
        bool known = sk_parent_of(tree.pids[i]) != getpid();
        for (struct sk_process *p = sk_processes; p != NULL && !known; p = p->next)
            known = p->supervisor == tree.pids[i];
        if (!known && !sk_shell_owns(tree.pids[i]))
            kill(tree.pids[i], SIGKILL);
    }
}

static bool ticking_needed(void)
{
    for (struct sk_process *p = sk_processes; p != NULL; p = p->next)
        if (p->killing || (p->exited && !p->told))
            return true;
    return false;
}

void sk_process_tick(void)
{
    for (struct sk_process *p = sk_processes, *next; p != NULL; p = next) {
        next = p->next;
        if (p->killing)
            continue_kill(p);
        sk_process_advance(p);
    }
    if (!ticking_needed())
        sk_tick(false);
}
