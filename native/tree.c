/* Which processes descend from which, read from /proc.
 *
 * Every execution has a supervisor that is a child subreaper, so whatever the execution starts stays below
 * that supervisor for good: daemonising only moves a process up to it. */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "skerry.h"

struct entry {
    pid_t pid, parent;
    bool dead, spared, inside;
};

static struct entry entries[SK_TREE_MAX];
static size_t count;
static bool held;

/* The parent of a process and its state, 0 if it is gone. A dead one (state 'Z') only waits for its parent to take
 * notice; one whose first thread has ended looks the same, and is told apart as 'S'. */
static pid_t look(pid_t pid, char *state)
{
    char path[32], text[512];
    snprintf(path, sizeof path, "/proc/%d/stat", (int)pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return 0;
    text[n] = 0;
    char *end = strrchr(text, ')'); /* the name before it may hold anything */
    int parent, threads;
    if (end == NULL || sscanf(end + 1, " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d", state,
                              &parent, &threads) != 3)
        return 0;
    if (*state == 'X')
        *state = 'Z';
    if (*state == 'Z' && threads > 1)
        *state = 'S';
    return (pid_t)parent;
}

pid_t sk_parent_of(pid_t pid)
{
    char state;
    pid_t parent = look(pid, &state);
    return parent != 0 && state != 'Z' ? parent : 0;
}

bool sk_waits_for_machine(pid_t pid)
{
    char state;
    return pid > 0 && look(pid, &state) != 0 && (state == 'R' || state == 'D');
}

static bool listed(const struct sk_tree *tree, pid_t pid)
{
    for (size_t i = 0; tree != NULL && i < tree->count; i++)
        if (tree->pids[i] == pid)
            return true;
    return false;
}

static void look_at_all(void)
{
    count = 0;
    DIR *dir = opendir("/proc");
    if (dir == NULL)
        return;
    for (struct dirent *d; (d = readdir(dir)) != NULL && count < SK_TREE_MAX;) {
        if (d->d_name[0] < '1' || d->d_name[0] > '9')
            continue;
        char state;
        pid_t pid = (pid_t)atoi(d->d_name), parent = look(pid, &state);
        if (parent != 0)
            entries[count++] = (struct entry){ .pid = pid, .parent = parent, .dead = state == 'Z' };
    }
    closedir(dir);
}

void sk_tree_hold(bool hold)
{
    if (hold)
        look_at_all();
    held = hold;
}

void sk_tree_read(struct sk_tree *tree, pid_t root, pid_t spare, const struct sk_tree *survivors)
{
    tree->count = 0;
    tree->dying = false;
    if (!held)
        look_at_all();
    for (size_t i = 0; i < count; i++) {
        entries[i].inside = false;
        entries[i].spared = listed(survivors, entries[i].pid);
        tree->dying |= entries[i].dead && entries[i].parent == root;
    }
    /* Parents may have higher numbers than their children, hence until nothing changes. They come first. */
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < count; i++) {
            if (entries[i].inside || entries[i].dead || entries[i].spared)
                continue;
            bool inside = entries[i].parent == root;
            for (size_t j = 0; j < count && !inside; j++)
                inside = entries[j].inside && entries[j].pid == entries[i].parent;
            changed |= inside;
            entries[i].inside = inside;
            if (inside && entries[i].pid != spare)
                tree->pids[tree->count++] = entries[i].pid;
        }
    }
}

bool sk_tree_outruns(struct sk_chase *chase, const struct sk_tree *tree)
{
    pid_t newest = 0;
    for (size_t i = 0; i < tree->count; i++)
        if (tree->pids[i] > newest)
            newest = tree->pids[i];
    chase->fresh_scans = newest > chase->newest ? chase->fresh_scans + 1 : 0;
    chase->newest = newest;
    return chase->fresh_scans > SK_CHASE_SCANS;
}
