/*
 * The guest's file applets: long file operations as programs of their own.
 *
 * The guest forks a child for each, as the workload's user and with pipes as its stdin, stdout and stderr;
 * so an applet simply blocks, writes until it is done and exits, and what it may touch is what the workload
 * itself may touch. What remains to be defended is the caller's intent: an operation on a path below the
 * workspace must not be led elsewhere by links, nor be held up by FIFOs, odd names or endless depth.
 * paths.c finds the place, applet_walk.c goes through trees; from there on everything is relative to an
 * open directory, and nothing recurses or allocates by what it finds.
 *
 * This file: the entry, errors and output, and the small applets list and remove. The others:
 * tar_write.c, tar_read.c, applet_watch.c.
 */
#define _GNU_SOURCE
#include "applet_common.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "paths.h"

#define MAX_REMARKS 4096 /* bytes on stderr: a tree of a million unreadable files needs no more */
#define MAX_PASSES 64    /* over directories that others fill while we empty them */
#define MAX_SWAPS 32     /* of a file for a directory, just as we remove it */

/* ---- Errors ---- */

bool applet_partial;
void (*applet_on_remark)(int error, const char *what);

static size_t put_line(int error, const char *what)
{
    char line[1024];
    const char *text = error == EXDEV ? "Leads outside" : strerror(error);
    size_t len = (size_t)snprintf(line, sizeof line, "errno=%d %s: ", error, text);
    for (; *what != '\0' && len < sizeof line - 8; what++) {
        unsigned char c = (unsigned char)*what;
        if (c >= ' ' && c < 127 && c != '\\')
            line[len++] = (char)c;
        else
            len += (size_t)sprintf(line + len, "\\x%02x", c);
    }
    line[len++] = '\n';
    (void)!write(STDERR_FILENO, line, len);
    return len;
}

void applet_remark(int error, const char *what)
{
    static size_t written;
    if (applet_on_remark != NULL)
        applet_on_remark(error, what);
    if (written < MAX_REMARKS)
        written += put_line(error, what);
}

void applet_complain(int error, const char *what)
{
    applet_partial = true;
    applet_remark(error, what);
}

void applet_fail(int error, const char *what)
{
    put_line(error, what);
    _exit(SK_APPLET_FAILED);
}

void applet_bad(const char *what)
{
    put_line(EBADMSG, what);
    _exit(SK_APPLET_BAD);
}

/* ---- Output ---- */

static uint8_t output[65536];
static size_t output_len;

void applet_flush(void)
{
    for (size_t done = 0; done < output_len;) {
        ssize_t n = write(STDOUT_FILENO, output + done, output_len - done);
        if (n < 0 && errno != EINTR)
            applet_fail(errno, "standard output");
        done += n > 0 ? (size_t)n : 0;
    }
    output_len = 0;
}

void applet_put(const void *data, size_t len)
{
    for (const uint8_t *from = data; len > 0;) {
        size_t n = sizeof output - output_len < len ? sizeof output - output_len : len;
        memcpy(output + output_len, from, n);
        output_len += n;
        from += n;
        len -= n;
        if (output_len == sizeof output)
            applet_flush();
    }
}

/* ---- list ---- */

static uint8_t *put_le(uint8_t *out, uint64_t value, int bytes)
{
    for (int i = 0; i < bytes; i++)
        *out++ = (uint8_t)(value >> (8 * i));
    return out;
}

size_t sk_stat_record(uint8_t *out, const struct stat *st, const char *name, size_t name_len,
                      const char *target, size_t target_len)
{
    static const char types[16] = {[S_IFREG >> 12] = 'f', [S_IFDIR >> 12] = 'd', [S_IFLNK >> 12] = 'l',
                                   [S_IFIFO >> 12] = 'p', [S_IFSOCK >> 12] = 's', [S_IFCHR >> 12] = 'c',
                                   [S_IFBLK >> 12] = 'b'};
    int64_t mtime_ns = (int64_t)st->st_mtim.tv_sec * 1000000000 + st->st_mtim.tv_nsec;
    uint8_t *p = put_le(out, (uint8_t)types[(st->st_mode & S_IFMT) >> 12], 1);
    p = put_le(p, st->st_mode & 07777, 4);
    p = put_le(p, st->st_uid, 4);
    p = put_le(p, st->st_gid, 4);
    p = put_le(p, (uint64_t)st->st_size, 8);
    p = put_le(p, (uint64_t)mtime_ns, 8);
    p = put_le(p, name_len, 2);
    memcpy(p, name, name_len);
    p = put_le(p + name_len, target_len, 2);
    if (target_len > 0)
        memcpy(p, target, target_len);
    return (size_t)(p + target_len - out);
}

static void applet_list(const struct applet_target *target, bool recursive)
{
    static uint8_t record[4 + SK_STAT_RECORD_MAX];
    static struct walk w;
    char link[PATH_MAX];
    int fd = sk_open(target->root_fd, target->rel, O_RDONLY | O_DIRECTORY, 0);
    if (fd < 0)
        applet_fail(-fd, target->rel);
    walk_start(&w, fd, "");
    for (enum walk_event event; (event = walk_next(&w)) != WALK_DONE;) {
        struct stat st;
        if (event == WALK_LEFT)
            continue;
        if (!w.fits) {
            applet_complain(ENAMETOOLONG, w.path);
            continue;
        }
        ssize_t link_len = 0;
        if (fstatat(w.dir_fd, w.name, &st, AT_SYMLINK_NOFOLLOW) < 0 ||
            (S_ISLNK(st.st_mode) && (link_len = readlinkat(w.dir_fd, w.name, link, sizeof link)) < 0)) {
            if (errno != ENOENT && errno != EINVAL)
                applet_complain(errno, w.path);
            continue;
        }
        size_t len = sk_stat_record(record + 4, &st, w.path, strlen(w.path), link, (size_t)link_len);
        put_le(record, len, 4);
        applet_put(record, 4 + len);
        int error = recursive && S_ISDIR(st.st_mode) ? -walk_enter(&w, false) : 0;
        if (error != 0 && !walk_vanished(error))
            applet_complain(error, w.path);
    }
}

/* ---- remove ---- */

/* Below what a path can hold, subtrees are moved to the top of the tree, for another pass. */
static bool move_up(const struct walk *w, int top_fd)
{
    static unsigned count;
    char name[32];
    snprintf(name, sizeof name, ".skerry-removed-%u", count++);
    if (renameat(w->dir_fd, w->name, top_fd, name) == 0)
        return true;
    applet_complain(errno, w->path);
    return false;
}

/* Removes or enters an entry; true if it was moved up instead. */
static bool remove_entry(struct walk *w, int top_fd)
{
    int error = 0;
    for (int i = 0; i < MAX_SWAPS; i++) {
        if (unlinkat(w->dir_fd, w->name, 0) == 0 || errno == ENOENT)
            return false;
        error = errno;
        if (error != EISDIR && error != EPERM)
            break;
        int entered = -walk_enter(w, true);
        if (entered == 0)
            return false;
        if (entered == ENAMETOOLONG)
            return move_up(w, top_fd);
        if (!walk_vanished(entered))
            error = entered;
        if (error != EISDIR)
            break; /* not removable, or not enterable; else swapped for a file meanwhile */
    }
    applet_complain(error, w->path);
    return false;
}

/* Removes what is in the directory `fd`, which it takes over. */
static void remove_contents(int fd)
{
    static struct walk w;
    int top_fd = openat(fd, ".", O_PATH | O_DIRECTORY | O_CLOEXEC), refilled = 0;
    if (top_fd < 0)
        applet_fail(errno, "");
    for (bool again = true; again;) {
        again = false;
        walk_start(&w, fd, "");
        for (enum walk_event event; (event = walk_next(&w)) != WALK_DONE;) {
            if (event == WALK_ENTRY) {
                again |= remove_entry(&w, top_fd);
            } else if (unlinkat(w.dir_fd, w.name, AT_REMOVEDIR) < 0 && errno != ENOENT) {
                /* Filled again, or swapped for something else, since we went through it. */
                int error = errno;
                if ((error == ENOTEMPTY || error == ENOTDIR) && !applet_partial && ++refilled < MAX_PASSES)
                    again |= remove_entry(&w, top_fd);
                else
                    applet_complain(error, w.path);
            }
        }
        if (again && (fd = openat(top_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)) < 0)
            applet_fail(errno, "");
    }
    close(top_fd);
}

static void applet_remove(const struct applet_target *target, bool recursive)
{
    const char *name;
    int dir = sk_open_parent(target->root_fd, target->rel, &name);
    if (dir == -EBUSY && recursive) {
        int fd = sk_open(target->root_fd, ".", O_RDONLY | O_DIRECTORY, 0);
        if (fd < 0)
            applet_fail(-fd, target->rel);
        remove_contents(fd);
        return;
    }
    if (dir < 0)
        applet_fail(-dir, target->rel);
    for (int i = 0; i < MAX_PASSES; i++) {
        if (unlinkat(dir, name, 0) == 0)
            return;
        int error = errno, fd;
        if (error != EISDIR && error != EPERM)
            applet_fail(error, target->rel);
        if (unlinkat(dir, name, AT_REMOVEDIR) == 0)
            return;
        if (!recursive || errno != ENOTEMPTY)
            applet_fail(errno == ENOTDIR ? error : errno, target->rel);
        if ((fd = walk_open(dir, name, true)) < 0)
            applet_fail(-fd, target->rel);
        remove_contents(fd);
        if (applet_partial)
            return;
    }
    applet_fail(ENOTEMPTY, target->rel);
}

/* ---- The entry ---- */

static const struct {
    const char *name, *flag;
    void (*run)(const struct applet_target *target, bool flag);
} applets[] = {
    {"list", "-r", applet_list},       {"remove", "-r", applet_remove}, {"watch", "-r", applet_watch},
    {"tar", "--contents", applet_tar}, {"untar", NULL, applet_untar},
};

int applet_run(const char *name, int argc, char **argv, const struct sk_roots *roots)
{
    struct applet_target target;
    /* EPIPE and EFBIG are errors like any other. */
    signal(SIGPIPE, SIG_IGN);
    signal(SIGXFSZ, SIG_IGN);
    for (size_t i = 0; i < sizeof applets / sizeof *applets; i++) {
        if (strcmp(name, applets[i].name) != 0)
            continue;
        bool flag = argc == 2 && applets[i].flag != NULL && strcmp(argv[1], applets[i].flag) == 0;
        if (argc != 1 + flag)
            break;
        int error = -sk_path_split(roots, argv[0], strlen(argv[0]), &target.root_fd, target.rel);
        if (error != 0)
            applet_fail(error, argv[0]);
        target.root_name =
            strrchr(target.root_fd == roots->tmp_fd ? roots->tmp_path : roots->workspace_path, '/') + 1;
        applets[i].run(&target, flag);
        applet_flush();
        return applet_partial ? SK_APPLET_PARTIAL : SK_APPLET_OK;
    }
    applet_remark(EINVAL, "no such applet, or not these arguments");
    return SK_APPLET_BAD;
}
