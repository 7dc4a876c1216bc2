/*
 * Runs applets as ordinary programs: applet_main WORKSPACE TMP VERB [ARGUMENT...]
 *
 * The verb is an applet's name, or one of these:
 *   read PATH, write PATH, mkdirs PATH   paths.c on its own: stdout, stdin; errors as the applets print them
 *   resolve                              for each line of stdin, a path: "errno" or "device:inode"
 *   each APPLET PATH                     for each archive on stdin (u32 length, bytes): its exit status
 *   race ROUNDS OUTSIDE ARCHIVE          applets on a tree in which a directory and a symlink to OUTSIDE
 *                                        change places all the time; what they print comes on stdout
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "../../../native/applets.h"
#include "../../../native/paths.h"

static int workspace, tmp;
static struct sk_roots roots = {.workspace_path = "/workspace", .tmp_path = "/tmp"};

static int copy(int from, int to)
{
    char data[4096];
    for (ssize_t n; (n = read(from, data, sizeof data)) > 0;)
        if (write(to, data, (size_t)n) != n)
            return -EIO;
    return 0;
}

static int probe(const char *verb, const char *path)
{
    char rel[PATH_MAX];
    int root, result = sk_path_split(&roots, path, strlen(path), &root, rel);
    if (result == 0 && strcmp(verb, "mkdirs") == 0)
        result = sk_mkdirs(root, rel, 0755);
    else if (result == 0 && strcmp(verb, "read") == 0)
        result = (result = sk_open_regular(root, rel, O_RDONLY, 0)) < 0 ? result : copy(result, 1);
    else if (result == 0)
        result = (result = sk_open_regular(root, rel, O_WRONLY | O_CREAT | O_TRUNC, 0644)) < 0
                     ? result
                     : copy(0, result);
    if (result < 0)
        fprintf(stderr, "errno=%d %s: %s\n", -result, strerror(-result), path);
    return result < 0 ? SK_APPLET_FAILED : SK_APPLET_OK;
}

static int resolve(void)
{
    char line[2 * PATH_MAX];
    while (fgets(line, sizeof line, stdin) != NULL) {
        struct stat st;
        line[strcspn(line, "\n")] = '\0';
        int fd = sk_open(workspace, line, O_PATH, 0);
        if (fd < 0 || fstat(fd, &st) < 0)
            printf("%d\n", fd < 0 ? -fd : errno);
        else
            printf("%llu:%llu\n", (unsigned long long)st.st_dev, (unsigned long long)st.st_ino);
        if (fd >= 0)
            close(fd);
    }
    return 0;
}

static int run(const char *applet, const char *path, const char *flag, int input)
{
    int status;
    pid_t pid = fork();
    if (pid == 0) {
        char *argv[] = {(char *)(uintptr_t)path, (char *)(uintptr_t)flag};
        dup2(input, 0);
        exit(applet_run(applet, flag != NULL ? 2 : 1, argv, &roots));
    }
    waitpid(pid, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

static int each(const char *applet, const char *path)
{
    static char archive[4 << 20];
    uint32_t len;
    while (fread(&len, sizeof len, 1, stdin) == 1) {
        int fd = memfd_create("archive", MFD_CLOEXEC);
        if (len > sizeof archive || fread(archive, 1, len, stdin) != len ||
            pwrite(fd, archive, len, 0) != (ssize_t)len)
            return 125;
        printf("%d\n", run(applet, path, NULL, fd));
        fflush(stdout);
        close(fd);
    }
    return 0;
}

static void race_round(int archive)
{
    static const struct {
        const char *applet, *path, *flag;
    } steps[] = {
        {"list", "tree", "-r"}, {"tar", "tree", NULL},      {"list", "tree/d/sub", NULL},
        {"tar", "tree/d", NULL}, {"tar", "tree/d/sub", NULL}, {"untar", "tree/d", NULL},
        {"remove", "tree/d/sub", "-r"}, {"remove", "tree", "-r"},
    };
    for (size_t i = 0; i < sizeof steps / sizeof *steps; i++) {
        lseek(archive, 0, SEEK_SET);
        run(steps[i].applet, steps[i].path, steps[i].flag, archive);
    }
}

/* "tree/d" is a directory of the archive, "aside/link" the symlink; another process exchanges them. */
static int race(int rounds, const char *outside, const char *archive_path)
{
    int archive = open(archive_path, O_RDONLY | O_CLOEXEC);
    pid_t pid = fork();
    if (pid == 0)
        while (getppid() != 1)
            syscall(SYS_renameat2, workspace, "tree/d", workspace, "aside/link", 2 /* RENAME_EXCHANGE */);
    for (int i = 0; i < rounds; i++) {
        do
            run("remove", "aside", "-r", 0);
        while (mkdirat(workspace, "aside", 0755) < 0);
        symlinkat(outside, workspace, "aside/link");
        lseek(archive, 0, SEEK_SET);
        run("untar", "tree", NULL, archive);
        race_round(archive);
    }
    kill(pid, SIGKILL);
    waitpid(pid, NULL, 0);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 4)
        return 125;
    const char *verb = argv[3];
    workspace = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    tmp = open(argv[2], O_PATH | O_DIRECTORY | O_CLOEXEC);
    roots.workspace_fd = workspace;
    roots.tmp_fd = tmp;
    if (workspace < 0 || tmp < 0)
        return 125;
    if (argc == 5 && (strcmp(verb, "read") == 0 || strcmp(verb, "write") == 0 || strcmp(verb, "mkdirs") == 0))
        return probe(verb, argv[4]);
    if (argc == 4 && strcmp(verb, "resolve") == 0)
        return resolve();
    if (argc == 6 && strcmp(verb, "each") == 0)
        return each(argv[4], argv[5]);
    if (argc == 7 && strcmp(verb, "race") == 0)
        return race(atoi(argv[4]), argv[5], argv[6]);
    return applet_run(verb, argc - 4, argv + 4, &roots);
}
