/* Runs an applet as an ordinary program: applet_main WORKSPACE TMP APPLET [ARGUMENT...] */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdio.h>

#include "../../../native/applets.h"

int main(int argc, char **argv)
{
    if (argc < 4)
        return 125;
    int workspace = open(argv[1], O_PATH | O_DIRECTORY | O_CLOEXEC);
    int tmp = open(argv[2], O_PATH | O_DIRECTORY | O_CLOEXEC);
    if (workspace < 0 || tmp < 0) {
        perror(argv[1]);
        return 125;
    }
    return applet_main(argv[3], argc - 4, argv + 4, workspace, tmp);
}
