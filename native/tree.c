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
    bool dead, inside;
};

static struct entry entries[SK_TREE_MAX];
static size_t count;
static bool held;

/* The parent of a process, 0 if it is gone. A dead one only waits for its parent to take notice; one whose first
 * thread has ended looks the same, and is not. */
static pid_t look(pid_t pid, bool *dead)
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
    char state;
    int parent, threads;
    if (end == NULL || sscanf(end + 1, " %c %d %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %*s %d", &state,
                              &parent, &threads) != 3)
        return 0;
    *dead = state == 'X' || (state == 'Z' && threads <= 1);
    return (pid_t)parent;
}

pid_t sk_parent_of(pid_t pid)
{
    bool dead;
    pid_t parent = look(pid, &dead);
    return parent != 0 && !dead ? parent : 0;
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
        bool dead = false;
        pid_t pid = (pid_t)atoi(d->d_name), parent = look(pid, &dead);
        if (parent != 0)
            entries[count++] = (struct entry){ pid, parent, dead, false };
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
        tree->dying |= entries[i].dead && entries[i].parent == root;
    }
    /* Parents may have higher numbers than their children, hence until nothing changes. */
    for (bool changed = true; changed;) {
        changed = false;
        for (size_t i = 0; i < count; i++) {
            if (entries[i].inside || entries[i].dead)
                continue;
            bool inside = entries[i].parent == root;
            for (size_t j = 0; j < count && !inside; j++)
                inside = entries[j].inside && entries[j].pid == entries[i].parent;
            changed |= inside;
            entries[i].inside = inside;
        }
    }
    for (size_t i = 0; i < count; i++)
        if (entries[i].inside && entries[i].pid != spare && !listed(survivors, entries[i].pid))
            tree->pids[tree->count++] = entries[i].pid;
}
