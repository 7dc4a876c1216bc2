/* Steps that build the mounts of an environment: see launch.c.
 *
 * All of it happens in a mount namespace of its own. Paths are below the new root, and never lead outside of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kernel.h"
#include "launch.h"

static int root_fd = -1, stage_fd = -1;
static const char *stage_path = "/proc"; /* where it covers the host's, until it is / itself */

static int set_attributes(int fd, unsigned flags, uint64_t set, uint64_t propagation)
{
    struct mount_attributes attr = { .set = set, .propagation = propagation };
    return (int)syscall(NR_MOUNT_SETATTR, fd, "", AT_EMPTY_PATH | flags, &attr, sizeof attr);
}

static void open_source(const struct sk_cursor *c)
{
    int n = sk_slot("tree", c->argv[1]);
    const char *flags = c->argv[3];
    unsigned recursive = strstr(flags, "rec") ? TREE_RECURSIVE : 0;
    uint64_t set = ATTR_NOSUID | (strstr(flags, "dev") ? ATTR_NOEXEC : ATTR_NODEV) |
                   (strstr(flags, "ro") ? ATTR_RDONLY : 0);
    sk_slots[n] = (int)sk_check(syscall(NR_OPEN_TREE, AT_FDCWD, c->argv[2], TREE_CLONE | TREE_CLOEXEC | recursive),
                          "tree", c->argv[2]);
    /* Private: what the host mounts there later does not appear inside. */
    sk_check(set_attributes(sk_slots[n], recursive, set, MS_PRIVATE), "tree-attributes", c->argv[2]);
}

/* A place in the new root, found without leaving it whatever symlinks the image holds. */
static int at_root(const char *step, const char *path, int missing_is_fine)
{
    struct open_request how = { .flags = O_PATH | O_CLOEXEC, .resolve = RESOLVE_AS_ROOT | RESOLVE_MAGICLINKS_NOT };
    int fd = (int)syscall(NR_OPENAT2, root_fd, path, &how, sizeof how);
    if (fd < 0 && !(missing_is_fine && (errno == ENOENT || errno == ENOTDIR)))
        sk_fail(step, path);
    return fd;
}

static void attach(const char *step, int mount_fd, const char *path)
{
    int target = at_root(step, path, 0);
    sk_check(syscall(NR_MOVE_MOUNT, mount_fd, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), step, path);
    close(target);
    close(mount_fd);
}

static int new_filesystem(const char *type, char *options, unsigned attributes)
{
    int fs = (int)sk_check(syscall(NR_FSOPEN, type, 1), "fsopen", type);
    for (char *save = NULL, *option = strtok_r(options, ",", &save); option; option = strtok_r(NULL, ",", &save)) {
        char *value = strchr(option, '=');
        if (value != NULL)
            *value++ = 0;
        sk_check(syscall(NR_FSCONFIG, fs, value ? CONF_STRING : CONF_FLAG, option, value, 0), type, option);
    }
    sk_check(syscall(NR_FSCONFIG, fs, CONF_CREATE, NULL, NULL, 0), type, "create");
    int fd = (int)sk_check(syscall(NR_FSMOUNT, fs, 1, attributes), type, "mount");
    close(fs);
    return fd;
}

/* The whole mount goes to the place first, because only what is mounted can be copied from; a copy of its
 * subdirectory then covers it for good. */
static void attach_below(int mount_fd, const char *path, const char *subdirectory)
{
    int target = at_root("volume", path, 0);
    sk_check(syscall(NR_MOVE_MOUNT, mount_fd, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "volume", path);
    int copy = (int)sk_check(syscall(NR_OPEN_TREE, mount_fd, subdirectory, TREE_CLONE | TREE_CLOEXEC), "volume", subdirectory);
    sk_check(syscall(NR_MOVE_MOUNT, copy, "", mount_fd, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "volume", path);
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
    sk_check(syscall(NR_MOVE_MOUNT, root_fd, "", AT_FDCWD, "/proc", MOVE_F_EMPTY), "stage", "");
    sk_check(mkdirat(root_fd, "root", 0555), "stage", "root");
    sk_check(mkdirat(root_fd, "empty", 0555), "stage", "empty");
}

static void new_root(const struct sk_cursor *c)
{
    root_fd = sk_slots[sk_slot("newroot", c->argv[1])];
    sk_check(syscall(NR_MOVE_MOUNT, root_fd, "", stage_fd, "root", MOVE_F_EMPTY), "newroot", c->argv[1]);
}

static void move(const char *path)
{
    int target = at_root("move", path, 0);
    sk_check(syscall(NR_MOVE_MOUNT, stage_fd, path, target, "", MOVE_T_EMPTY), "move", path);
    close(target);
}

/* Files that several environments see, the host's among them, are the same to the kernel wherever they are seen: who
 * watches or locks one learns of all who use it, and holds them up. An overlay gives them another identity, at the
 * cost of a mount. Where the kernel cannot make one (before 5.11, or stacked too deep) they stay what they are. */
static void make_own(const char *path, const char *below) /* an overlay takes two layers */
{
    char lower[PATH_MAX];
    snprintf(lower, sizeof lower, "%s/root/%s:%s/%s", stage_path, path, stage_path, below);
    int fs = (int)syscall(NR_FSOPEN, "overlay", 1), fd = -1;
    if (fs >= 0 && syscall(NR_FSCONFIG, fs, CONF_STRING, "lowerdir", lower, 0) == 0 &&
        syscall(NR_FSCONFIG, fs, CONF_CREATE, NULL, NULL, 0) == 0)
        fd = (int)syscall(NR_FSMOUNT, fs, 1, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV);
    if (fd < 0)
        sk_complain('W', "own", path);
    if (fs >= 0)
        close(fs);
    if (fd < 0)
        return;
    if (strcmp(path, ".") != 0) {
        attach("own", fd, path);
        return;
    }
    sk_check(syscall(NR_MOVE_MOUNT, fd, "", stage_fd, "root", MOVE_F_EMPTY), "own", path);
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
    sk_check(fstat(target, &st), "mask", path);
    bool first = S_ISDIR(st.st_mode) && nothing < 0;
    if (first) {
        char options[] = "size=4k,nr_inodes=2,mode=0555";
        cover = new_filesystem("tmpfs", options, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC);
        nothing = cover; /* once it is mounted, it can be copied from */
    } else if (S_ISDIR(st.st_mode)) {
        cover = (int)sk_check(syscall(NR_OPEN_TREE, nothing, "", TREE_CLONE | TREE_CLOEXEC | AT_EMPTY_PATH), "mask", path);
    } else {
        cover = (int)sk_check(syscall(NR_OPEN_TREE, root_fd, "dev/null", TREE_CLONE | TREE_CLOEXEC), "mask", path);
    }
    sk_check(syscall(NR_MOVE_MOUNT, cover, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "mask", path);
    if (!first)
        close(cover);
    close(target);
}

static void make_readonly(const char *path)
{
    int target = at_root("readonly", path, 1);
    if (target < 0)
        return;
    int copy = (int)sk_check(syscall(NR_OPEN_TREE, target, "", TREE_CLONE | TREE_CLOEXEC | AT_EMPTY_PATH), "readonly", path);
    sk_check(set_attributes(copy, 0, ATTR_RDONLY | ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC, 0), "readonly", path);
    sk_check(syscall(NR_MOVE_MOUNT, copy, "", target, "", MOVE_F_EMPTY | MOVE_T_EMPTY), "readonly", path);
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
    sk_check(fd, "sysctl", name);
    sk_check(write(fd, value, strlen(value)), "sysctl", name);
    close(fd);
}

static void seal(const char *path)
{
    int fd = at_root("seal", path, 0);
    sk_check(set_attributes(fd, 0, ATTR_RDONLY, 0), "seal", path);
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
        sk_check(mkdirat(parent, name, (mode_t)sk_number(step, argument)), step, path);
    } else if (strcmp(step, "symlink") == 0) {
        sk_check(symlinkat(argument, parent, name), step, path);
    } else {
        int fd = (int)sk_check(openat(parent, name, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644), step, path);
        size_t len = strlen(argument);
        if (len != 0 && write(fd, argument, len) != (ssize_t)len)
            sk_fail(step, path);
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
    sk_check(fchdir(root_fd), "pivot", "fchdir");
    sk_check(syscall(SYS_pivot_root, ".", "."), "pivot", "pivot_root");
    sk_check(umount2(".", MNT_DETACH), "pivot", "umount");
    sk_check(chdir("/"), "pivot", "chdir");
    if (root_fd == stage_fd)
        stage_path = "";
    else
        close_roots();
}

/* The new root covers the stage. To unmount that, or to pivot again, would take the kernel longer than all other steps
 * together, and there is nothing in it that anybody could find. */
static void enter(void)
{
    sk_check(fchdir(root_fd), "enter", "fchdir");
    sk_check(syscall(NR_MOVE_MOUNT, root_fd, "", AT_FDCWD, "/", MOVE_F_EMPTY), "enter", "move");
    sk_check(chroot("."), "enter", "chroot");
    sk_check(chdir("/"), "enter", "chdir");
    close_roots();
}

bool sk_mount_step(const struct sk_cursor *c)
{
    if (sk_is_step(c, "tree", 3))
        open_source(c);
    else if (sk_is_step(c, "stage", 0))
        stage();
    else if (sk_is_step(c, "newroot", 1))
        new_root(c);
    else if (sk_is_step(c, "move", 1))
        move(c->argv[1]);
    else if (sk_is_step(c, "own", 1))
        make_own(c->argv[1], "empty");
    else if (sk_is_step(c, "complete", 2)) {
        char below[PATH_MAX];
        snprintf(below, sizeof below, "root/%s", c->argv[2]);
        make_own(c->argv[1], below);
    } else if (sk_is_step(c, "dir", 2) || sk_is_step(c, "symlink", 2) || sk_is_step(c, "file", 2))
        make(c->argv[0], c->argv[1], c->argv[2]);
    else if (sk_is_step(c, "place", 2))
        attach("place", sk_slots[sk_slot("place", c->argv[1])], c->argv[2]);
    else if (sk_is_step(c, "volume", 3))
        attach_below(sk_slots[sk_slot("volume", c->argv[1])], c->argv[2], c->argv[3]);
    else if (sk_is_step(c, "tmpfs", 3))
        attach("tmpfs",
               new_filesystem("tmpfs", c->argv[2],
                              ATTR_NOSUID | ATTR_NODEV | (strstr(c->argv[3], "noexec") ? ATTR_NOEXEC : 0)),
               c->argv[1]);
    else if (sk_is_step(c, "proc", 1)) {
        char none[1] = "";
        attach("proc", new_filesystem("proc", none, ATTR_NOSUID | ATTR_NODEV | ATTR_NOEXEC), c->argv[1]);
    } else if (sk_is_step(c, "devpts", 2)) {
        char options[64];
        snprintf(options, sizeof options, "newinstance,ptmxmode=0666,mode=0620,max=%s", c->argv[2]);
        attach("devpts", new_filesystem("devpts", options, ATTR_NOSUID | ATTR_NOEXEC), c->argv[1]);
    } else if (sk_is_step(c, "sysctl", 2))
        set_sysctl(c->argv[1], c->argv[2]);
    else if (sk_is_step(c, "mask", 1))
        mask(c->argv[1]);
    else if (sk_is_step(c, "readonly", 1))
        make_readonly(c->argv[1]);
    else if (sk_is_step(c, "seal", 1))
        seal(c->argv[1]);
    else if (sk_is_step(c, "pivot", 0))
        pivot();
    else if (sk_is_step(c, "enter", 0))
        enter();
    else
        return false;
    return true;
}
