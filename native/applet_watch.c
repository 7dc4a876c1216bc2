/*
 * The applet watch: tells of changes below a directory as they happen, through inotify.
 *
 * inotify watches single directories and tells the names of entries in them, so a recursive watch keeps a
 * table of directories, each with its watch, its name and its parent's index: paths are put together when
 * an event comes, and a renamed directory takes everything below it along. A directory that appears is
 * watched first and read afterwards: what was already in it is told as created, some of it perhaps twice,
 * nothing never. When events or watches run out, an 'o' record says that something was missed.
 *
 * A directory that leaves (moved-from) is remembered until the next event; if that is not its moved-to, the
 * directory left the tree and its watches go.
 *
 * No descriptor of a watched directory stays open: it would keep its removal from being told.
 */
#define _GNU_SOURCE
#include "applet_common.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/inotify.h>
#include <unistd.h>

#include "paths.h"

#define MAX_WATCHES 8192
#define HASH_SLOTS 4096
#define EVENTS (IN_CREATE | IN_CLOSE_WRITE | IN_DELETE | IN_MOVED_FROM | IN_MOVED_TO | IN_ATTRIB)
#define NONE (-1)

struct node {
    int wd;         /* 0: a free slot; -1: not watched yet */
    int parent;     /* NONE for the root, which is node 0 */
    int next_alike; /* with the same hash of wd */
    int next_todo;  /* to be watched and read */
    char name[NAME_MAX + 1];
};

static struct node *nodes;
static int hash[HASH_SLOTS], todo_first, todo_last, last_added;
static int inotify_fd;
static int leaving; /* the directory of a moved-from, or NONE */
static uint32_t leaving_cookie;
static const struct applet_target *target;
static bool recursive;
static bool full; /* the table once was, which was told */

/* ---- Records ---- */

static void put_record(char kind, uint32_t cookie, const char *name)
{
    size_t len = strlen(name), body = 7 + len;
    uint8_t head[11];
    for (int i = 0; i < 4; i++) {
        head[i] = (uint8_t)(body >> (8 * i));
        head[5 + i] = (uint8_t)(cookie >> (8 * i));
    }
    head[4] = (uint8_t)kind;
    head[9] = (uint8_t)len;
    head[10] = (uint8_t)(len >> 8);
    applet_put(head, sizeof head);
    applet_put(name, len);
}

static void put_missed(int error, const char *why)
{
    applet_remark(error, why);
    put_record('o', 0, "");
}

/* ---- The table ---- */

/* The path of an entry in a node (or of the node, if `name` is ""), relative to the watched directory. */
static const char *path_of(int node, const char *name)
{
    static char path[SK_NAME_LIMIT + 1];
    char *at = path + SK_NAME_LIMIT;
    *at = '\0';
    for (;;) {
        size_t len = strlen(name);
        if ((size_t)(at - path) < len + 1)
            return NULL;
        if (len > 0 && *at != '\0')
            *--at = '/';
        at -= len;
        memcpy(at, name, len);
        if (node <= 0)
            return at;
        name = nodes[node].name;
        node = nodes[node].parent;
    }
}

static int find(int wd)
{
    int node = hash[wd % HASH_SLOTS];
    while (node != NONE && nodes[node].wd != wd)
        node = nodes[node].next_alike;
    return node;
}

static int find_child(int parent, const char *name)
{
    for (int i = 1; i < MAX_WATCHES; i++)
        if (nodes[i].wd > 0 && nodes[i].parent == parent && strcmp(nodes[i].name, name) == 0)
            return i;
    return NONE;
}

static void add(int parent, const char *name)
{
    int node = last_added, tries = MAX_WATCHES;
    while (nodes[node = (node + 1) % MAX_WATCHES].wd != 0)
        if (--tries == 0) {
            if (!full)
                put_missed(ENOSPC, "too many directories to watch");
            full = true;
            return;
        }
    last_added = node;
    nodes[node] = (struct node){.wd = -1, .parent = parent, .next_todo = NONE};
    strcpy(nodes[node].name, name);
    if (todo_first == NONE)
        todo_first = node;
    else
        nodes[todo_last].next_todo = node;
    todo_last = node;
}

static void drop(int node)
{
    int wd = nodes[node].wd;
    if (wd > 0) {
        int *at = &hash[wd % HASH_SLOTS];
        while (*at != node)
            at = &nodes[*at].next_alike;
        *at = nodes[node].next_alike;
    }
    nodes[node].wd = 0;
}

static bool is_below(int node, int top)
{
    for (int steps = 0; node != NONE && steps < MAX_WATCHES; steps++, node = nodes[node].parent)
        if (node == top)
            return true;
    return false;
}

static void drop_tree(int top)
{
    static bool below[MAX_WATCHES];
    for (int i = 0; i < MAX_WATCHES; i++)
        below[i] = nodes[i].wd > 0 && is_below(i, top);
    for (int i = 0; i < MAX_WATCHES; i++)
        if (below[i]) {
            inotify_rm_watch(inotify_fd, nodes[i].wd);
            drop(i);
        }
}

/* ---- Watching ---- */

static int open_node(int node)
{
    static char path[PATH_MAX + 1 + SK_NAME_LIMIT + 1];
    const char *rel = path_of(node, "");
    if (rel == NULL)
        return -ENAMETOOLONG;
    snprintf(path, sizeof path, "%s%s%s", target->rel, *rel != '\0' ? "/" : "", rel);
    return sk_open(target->root_fd, path, O_RDONLY | O_DIRECTORY | (node > 0 ? O_NOFOLLOW : 0), 0);
}

/* inotify takes paths, not descriptors: "." is the one that cannot be swapped. */
static int watch_fd(int fd)
{
    int wd = fchdir(fd) == 0 ? inotify_add_watch(inotify_fd, ".", EVENTS | IN_ONLYDIR | IN_EXCL_UNLINK) : -1;
    int error = errno;
    return chdir("/") == 0 && wd >= 0 ? wd : -error;
}

static void read_directory(int node, int fd, bool announce)
{
    struct stat st;
    DIR *dir = fdopendir(fd);
    if (dir == NULL) {
        close(fd);
        return;
    }
    for (struct dirent *entry; (entry = readdir(dir)) != NULL;) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        const char *path = announce ? path_of(node, entry->d_name) : NULL;
        if (path != NULL)
            put_record('c', 0, path);
        if (entry->d_type == DT_DIR ||
            (entry->d_type == DT_UNKNOWN && fstatat(fd, entry->d_name, &st, AT_SYMLINK_NOFOLLOW) == 0 &&
             S_ISDIR(st.st_mode)))
            add(node, entry->d_name);
    }
    closedir(dir);
}

/* Watches and reads the directories that were added, and those in them. */
static void work_off(bool announce)
{
    while (todo_first != NONE) {
        int node = todo_first, fd = open_node(node);
        todo_first = nodes[node].next_todo;
        int wd = fd < 0 ? fd : watch_fd(fd);
        if (wd > 0 && find(wd) == NONE) {
            nodes[node].wd = wd;
            nodes[node].next_alike = hash[wd % HASH_SLOTS];
            hash[wd % HASH_SLOTS] = node;
            if (recursive) {
                read_directory(node, fd, announce);
                continue;
            }
        } else if (wd > 0 || node > 0) {
            if (wd < 0 && !walk_vanished(-wd))
                put_missed(-wd, nodes[node].name);
            drop(node);
        } else {
            applet_fail(-wd, target->rel);
        }
        if (fd >= 0)
            close(fd);
    }
}

static void start(void)
{
    memset(nodes, 0, MAX_WATCHES * sizeof *nodes);
    for (int i = 0; i < HASH_SLOTS; i++)
        hash[i] = NONE;
    todo_first = leaving = NONE;
    last_added = MAX_WATCHES - 1;
    if ((inotify_fd = inotify_init1(IN_CLOEXEC)) < 0)
        applet_fail(errno, "inotify");
    add(NONE, "");
    work_off(false);
}

/* ---- Events ---- */

static char kind_of(uint32_t mask)
{
    return mask & IN_CREATE        ? 'c'
           : mask & IN_CLOSE_WRITE ? 'm'
           : mask & IN_DELETE      ? 'd'
           : mask & IN_MOVED_FROM  ? 'f'
           : mask & IN_MOVED_TO    ? 't'
                                   : 'a';
}

static void directory_event(int node, const struct inotify_event *event)
{
    if (event->mask & IN_MOVED_FROM) {
        leaving = find_child(node, event->name);
        leaving_cookie = event->cookie;
    } else if (event->mask & IN_MOVED_TO && leaving != NONE) {
        nodes[leaving].parent = node;
        strcpy(nodes[leaving].name, event->name);
        leaving = NONE;
    } else if (event->mask & (IN_CREATE | IN_MOVED_TO)) {
        add(node, event->name);
        work_off(true);
    }
}

/* False once the watched directory itself is gone. */
static bool handle(const struct inotify_event *event)
{
    if (leaving != NONE && !(event->mask & IN_MOVED_TO && event->cookie == leaving_cookie)) {
        drop_tree(leaving);
        leaving = NONE;
    }
    int node = find(event->wd);
    if (node == NONE)
        return true;
    if (event->mask & IN_IGNORED) {
        drop(node);
        if (node == 0)
            put_record('d', 0, "");
        return node != 0;
    }
    if (event->len == 0)
        return true; /* about the directory itself: its parent tells by name */
    const char *path = path_of(node, event->name);
    if (path == NULL)
        put_missed(ENAMETOOLONG, event->name);
    else
        put_record(kind_of(event->mask), event->cookie, path);
    if (recursive && event->mask & IN_ISDIR)
        directory_event(node, event);
    return true;
}

void applet_watch(const struct applet_target *where, bool all)
{
    static char events[16384] __attribute__((aligned(__alignof__(struct inotify_event))));
    target = where;
    recursive = all;
    if ((nodes = malloc(MAX_WATCHES * sizeof *nodes)) == NULL)
        applet_fail(ENOMEM, target->rel);
    start();
    put_record('r', 0, "");
    for (;;) {
        applet_flush();
        struct pollfd waiting[] = {{.fd = inotify_fd, .events = POLLIN}, {.fd = STDOUT_FILENO}};
        if (poll(waiting, 2, -1) < 0 && errno != EINTR)
            applet_fail(errno, "poll");
        if (waiting[1].revents != 0)
            return; /* nobody listens any more */
        ssize_t len = waiting[0].revents != 0 ? read(inotify_fd, events, sizeof events) : 0;
        if (len < 0 && errno != EINTR)
            applet_fail(errno, "inotify");
        for (ssize_t at = 0; at < len;) {
            const struct inotify_event *event = (const struct inotify_event *)(const void *)(events + at);
            at += (ssize_t)(sizeof *event + event->len);
            if (event->mask & IN_Q_OVERFLOW) {
                close(inotify_fd);
                start();
                put_missed(EOVERFLOW, "events came too fast");
                break; /* the rest is about watches that are no more */
            }
            if (!handle(event))
                return;
        }
    }
}
